const char * demo(void) { return "K3_FLASHKDA_ACTIVE"; }
