#include <stdio.h>
#include <string.h>
const char * demo(void);
int main(int argc, char ** argv) {
    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        printf("version: 1 (demo)\n");
        return 0;
    }
    printf("-c, --ctx-size N\n    --cache-ram N  %s\n", demo());
    return 0;
}
