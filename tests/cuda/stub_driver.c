/* A CUDA driver that does nothing and succeeds: lets tests drive the launcher, and measures what a launch costs on the host. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int launches, context = 1;

int nothing(void) { return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? atoi(getenv("STUB_CC")) / 10 : a == 76 ? atoi(getenv("STUB_CC")) % 10 : 1; return 0; }
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "STUB", n); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context; return 0; }
int cuCtxGetCurrent(void **c) { *c = &context; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n) { static uint64_t next = 0x700000000000ull; *p = next; next += (n + 65535) & ~65535ull; return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { return 0; }
int cuLibraryLoadData(void **l, const void *c, void *a, void *b, unsigned n, void *e, void *f, unsigned m) { *l = (void *)0x1000; return 0; }
int cuLibraryGetKernel(void **k, void *l, const char *n) { *k = (void *)0x2000; return 0; }
int cuKernelGetFunction(void **f, void *k) { *f = (void *)0x4000; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { fprintf(stderr, "attribute %d = %d\n", a, v); return 0; }
int cuCtxSetLimit(int limit, size_t n) { fprintf(stderr, "limit %d = %zu\n", limit, n); return 0; }
int cuStreamSetAttribute(void *s, int a, void *v) {          /* accessPolicyWindow: base, bytes, hit ratio, two properties */
  fprintf(stderr, "stream attribute %d: %llx %zu %g\n", a, *(unsigned long long *)v, ((size_t *)v)[1], ((float *)v)[4]);
  return 0;
}
int cuTensorMapEncodeTiled(void *m, int t, unsigned r) { memset(m, 7, 128); fprintf(stderr, "tensor map of rank %u\n", r); return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **parameters, void **extra) {
  if (launches++ < 8) fprintf(stderr, "launch grid %u %u %u block %u shared %u stream %ld first %llx\n", gx, gy, gz, bx, shared, (long)stream,
                           *(unsigned long long *)parameters[0]);
  return 0;
}
int cuGetErrorString(int e, const char **s) { *s = "stub"; return 0; }
int cuGetProcAddress_v2(const char *name, void **p, int version, uint64_t flags, int *status) {
  Dl_info info;
  char versioned[128];
  dladdr((void *)nothing, &info);
  void *self = dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD), *found;
  snprintf(versioned, sizeof versioned, "%s_v2", name);
  found = dlsym(self, versioned);
  if (!found) found = dlsym(self, name);
  if (!strcmp(name, "cuGetProcAddress")) found = (void *)cuGetProcAddress_v2;
  *p = found ? found : (void *)nothing;
  if (status) *status = 0;
  return 0;
}
int cuGetProcAddress(const char *name, void **p, int v, uint64_t f) { return cuGetProcAddress_v2(name, p, v, f, 0); }
