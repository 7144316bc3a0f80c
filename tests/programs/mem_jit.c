// Generated code: written, made executable, called, regenerated; also one page mapped writable and executable at two addresses.
#include "check.h"
static void emit(unsigned char *p, uint32_t v) {  // mov eax, v ; add eax, edi ; ret
    unsigned char code[] = {0xb8, 0, 0, 0, 0, 0x01, 0xf8, 0xc3};
    memcpy(code + 1, &v, 4);
    memcpy(p, code, sizeof code);
}
int main(void) {
    begin("mem_jit");
    unsigned char *x = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    unsigned char *rwx = mmap(NULL, 4096, PROT_READ | PROT_WRITE | PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int fd = (int)OK(memfd_create("jit", 0));
    OK(ftruncate(fd, 4096));
    unsigned char *w = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0), *e = mmap(NULL, 4096, PROT_READ | PROT_EXEC, MAP_SHARED, fd, 0);
    close(fd);
    CHECK(x != MAP_FAILED && rwx != MAP_FAILED && w != MAP_FAILED && e != MAP_FAILED);
    for (uint32_t r = 1; running(); r++) {
        OK(mprotect(x, 65536, PROT_READ | PROT_WRITE));
        for (uint32_t i = 0; i < 1024; i++) emit(x + i * 64, r * 31 + i);
        OK(mprotect(x, 65536, PROT_READ | PROT_EXEC));
        emit(rwx, r);
        emit(w + 128, r * 7);
        for (int k = 0; k < 200; k++) {
            uint32_t i = (uint32_t)mix((uint64_t)k) % 1024;
            EQ(((uint32_t(*)(uint32_t))(x + i * 64))(5), r * 31 + i + 5);
            EQ(((uint32_t(*)(uint32_t))rwx)(9), r + 9);
            EQ(((uint32_t(*)(uint32_t))(e + 128))(1), r * 7 + 1);
        }
        nap_us(1000);
    }
    return finish();
}
