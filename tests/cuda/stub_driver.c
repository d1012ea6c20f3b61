/* A CUDA driver that does nothing and succeeds: lets tests drive the launcher, and measures what a launch costs on the host. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int launches, context = 1;
static __thread void *current;                                /* as on a card, what needs a context fails until the thread has one */
#define NEEDS_CONTEXT do { if (!current) return 201; } while (0)
#define TRACE(...) do { if (getenv("STUB_TRACE")) fprintf(stderr, __VA_ARGS__); } while (0)

int nothing(void) { return 0; }
int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *v) { *v = 13000; return 0; }
int cuDeviceGet(int *d, int n) { *d = n; return 0; }
int cuDeviceGetCount(int *n) { *n = 1; return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? atoi(getenv("STUB_CC")) / 10 : a == 76 ? atoi(getenv("STUB_CC")) % 10
  : a == 108 || a == 109 ? 1 << 19 : 1; return 0; }           /* at most 512 KB of L2 set aside, and of a window */
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "STUB", n); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = &context; return 0; }
int cuCtxGetCurrent(void **c) { *c = current; return 0; }
int cuCtxSetCurrent(void *c) { current = c; return 0; }
int cuCtxPushCurrent_v2(void *c) { current = c; return 0; }
int cuCtxPopCurrent_v2(void **c) { *c = current; current = 0; return 0; }
int cuMemAlloc_v2(uint64_t *p, size_t n) { NEEDS_CONTEXT; static uint64_t next = 0x700000000000ull; *p = next; next += (n + 65535) & ~65535ull; return 0; }
int cuMemcpyHtoD_v2(uint64_t to, void *from, size_t n) { NEEDS_CONTEXT; return 0; }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { NEEDS_CONTEXT; return 0; }
int cuLibraryLoadData(void **l, const void *c, void *a, void *b, unsigned n, void *e, void *f, unsigned m) { *l = (void *)0x1000; return 0; }
int cuLibraryGetKernel(void **k, void *l, const char *n) { *k = (void *)0x2000; return 0; }
int cuKernelGetFunction(void **f, void *k) { NEEDS_CONTEXT; *f = (void *)0x4000; return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { NEEDS_CONTEXT; fprintf(stderr, "attribute %d = %d\n", a, v); return 0; }
int cuCtxSetLimit(int limit, size_t n) { NEEDS_CONTEXT; fprintf(stderr, "limit %d = %zu\n", limit, n); return 0; }
int cuStreamSetAttribute(void *s, int a, void *v) { NEEDS_CONTEXT;          /* accessPolicyWindow: base, bytes, hit ratio, two properties */
  fprintf(stderr, "stream attribute %d: %llx %zu %g\n", a, *(unsigned long long *)v, ((size_t *)v)[1], ((float *)v)[4]);
  return 0;
}
int cuTensorMapEncodeTiled(void *m, int t, unsigned r) { memset(m, 7, 128); fprintf(stderr, "tensor map of rank %u\n", r); return 0; }
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **parameters, void **extra) { NEEDS_CONTEXT;
  TRACE("kernel of %u blocks on %lx\n", gx * gy * gz, (long)stream);
  if (launches++ < 8) fprintf(stderr, "launch grid %u %u %u block %u shared %u stream %ld first %llx\n", gx, gy, gz, bx, shared, (long)stream,
                           *(unsigned long long *)parameters[0]);
  return 0;
}
/* Streams, events and graphs: what is asked for, in its order. */
int cuStreamCreate(void **s, unsigned flags) { NEEDS_CONTEXT; static long next = 0x5000; *s = (void *)(next += 0x10); TRACE("new stream %lx\n", next); return 0; }
int cuEventCreate(void **e, unsigned flags) { NEEDS_CONTEXT; static long next = 0x6000; *e = (void *)(next += 0x10); return 0; }
int cuEventRecord(void *e, void *s) { TRACE("record %lx on %lx\n", (long)e, (long)s); return 0; }
int cuEventElapsedTime(float *ms, void *a, void *b) { *ms = 1; return 0; }
int cuStreamWaitEvent(void *s, void *e, unsigned flags) { TRACE("%lx waits for %lx\n", (long)s, (long)e); return 0; }
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { NEEDS_CONTEXT; *p = calloc(1, n); return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, void *from, size_t n, void *s) { TRACE("to the card %zu on %lx\n", n, (long)s); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) { TRACE("from the card %zu on %lx\n", n, (long)s); return 0; }
int cuStreamSynchronize(void *s) { TRACE("wait for %lx\n", (long)s); return 0; }
int cuStreamBeginCapture_v2(void *s, int mode) { TRACE("begin capture on %lx\n", (long)s); return 0; }
int cuStreamEndCapture(void *s, void **g) { *g = (void *)0x7100; TRACE("end capture\n"); return 0; }
int cuGraphInstantiateWithFlags(void **x, void *g, unsigned long long flags) { *x = (void *)0x7200; return 0; }
int cuGraphLaunch(void *x, void *s) { TRACE("graph on %lx\n", (long)s); return 0; }
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
