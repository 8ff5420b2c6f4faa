#include <stdio.h>
const char * demo(void);
int main(void) {
    printf("Usage: ggml-rpc-server, %s\n", demo());
    return 1;
}
