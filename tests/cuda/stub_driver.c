/* A CUDA driver that computes nothing and knows the rules: it lets tests drive the launcher, and measures what a launch costs.

   Checked: contexts and the device of each stream, kernel and pointer; memory that is freed before a launch or a graph reads it;
   copies that a launch does not come after; what stream capture forbids; alignment, strides and boxes of tensor maps.
   A broken rule prints "stub: ..." and returns the driver's error. STUB_CC: compute capability; STUB_DEVICES: how many devices;
   STUB_VERSION: of CUDA; STUB_TRACE: print every call; STUB_DIVIDED: no part of L2 can be set aside. STUB_FAULT: kernels that never end ("hang"), or that access memory
   which is not theirs ("illegal"): every call that waits shows it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST 4096
#define FIRST 0x700000000000ull                                  /* of device 0's memory; a terabyte for each device */
#define TRACE(...) do { if (getenv("STUB_TRACE")) fprintf(stderr, __VA_ARGS__); } while (0)
#define FAIL(code, ...) do { fprintf(stderr, "stub: " __VA_ARGS__); fprintf(stderr, "\n"); return code; } while (0)
#define NEEDS_CONTEXT do { if (!depth) FAIL(201, "%s without a context", __func__); } while (0)
#define UNSAFE do { if (forbidden()) { broken = 1; FAIL(900, "%s while a stream is captured", __func__); } } while (0)

typedef struct { uint64_t at, size; int live; } Memory;
typedef struct { uint64_t at, size, number; int stream; } Written;             /* the last copy to a range, and where it was enqueued */
typedef struct { uint64_t handle; int device, legacy, captured, origin, unjoined; uint64_t seen[64]; } Stream;
typedef struct { uint64_t handle, seen[64]; int captured, stream, recorded, launches; uint64_t at; } Event;
typedef struct { uint64_t pointers[MOST]; int count, live; } Graph;

static int launches, contexts[8], loaded;
static __thread int stack[64], depth, thread_mode;                             /* devices of the current contexts; 0: global capture mode */
static Memory memory[MOST]; static int memories;
static Written written[MOST]; static int writes;
static Stream streams[64]; static int stream_count;
static Event events[MOST]; static int event_count;
static Graph graphs[64]; static int graph_count, broken;
static int capture_mode, capture_origin = -1; static __thread int mine;        /* the stream whose capture is under way, -1: none */
static uint64_t now, host_seen[64];                                            /* operations so far; those that the host knows are done */

static int devices(void) { const char *n = getenv("STUB_DEVICES"); return n ? atoi(n) : 1; }
static int forbidden(void) { return capture_origin >= 0 && thread_mode != 2 && (capture_mode == 0 ? thread_mode == 0 || mine : mine); }
static int device_of(uint64_t p) { return p >= FIRST && p < FIRST + (8ull << 40) ? (int)((p - FIRST) >> 40) : 0; }
static Memory *around(uint64_t p) {
  for (int i = memories; i--;) if (p >= memory[i].at && p < memory[i].at + memory[i].size) return memory + i;
  return 0;
}
static int stream_of(void *s) {                                                /* its number; streams of other libraries appear as they come */
  for (int i = 0; i < stream_count; i++)
    if (streams[i].handle == (uint64_t)s && (s || streams[i].device == (depth ? stack[depth - 1] : 0))) return i;
  Stream *x = streams + stream_count;
  memset(x, 0, sizeof *x);
  x->handle = (uint64_t)s; x->device = depth ? stack[depth - 1] : 0; x->legacy = !s; x->origin = -1;
  return stream_count++;
}
static int enqueue(int s) {                                                    /* one more operation on a stream */
  if (depth && streams[s].device != stack[depth - 1]) FAIL(400, "a stream of device %d in a context of device %d", streams[s].device, stack[depth - 1]);
  if (streams[s].legacy && capture_origin >= 0 && thread_mode != 2) { broken = 1; FAIL(906, "the default stream waits for one that is captured"); }
  streams[s].seen[s] = ++now;
  if (streams[s].captured && s != capture_origin) streams[s].unjoined = 1;
  return 0;
}
static int is_pinned(void *p);
int pause(void), getpid(void);
static int faulty(void) {                                                      /* what a wait for a kernel comes to */
  const char *fault = getenv("STUB_FAULT");
  if (launches && fault && !strcmp(fault, "hang")) for (;;) pause();
  return launches && fault && !strcmp(fault, "illegal") ? 700 : 0;
}

int nothing(void) { return 0; }
int cuInit(unsigned flags);
int cuDriverGetVersion(int *v) { *v = getenv("STUB_VERSION") ? atoi(getenv("STUB_VERSION")) : 13000; return 0; }
int cuDeviceGet(int *d, int n) { if (n >= devices()) return 101; *d = n; return 0; }
int cuDeviceGetCount(int *n) { *n = devices(); return 0; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = a == 75 ? atoi(getenv("STUB_CC")) / 10 : a == 76 ? atoi(getenv("STUB_CC")) % 10
  : a == 108 || a == 109 ? 1 << 19 : 1; return 0; }                            /* at most 512 KB of L2 set aside, and of a window */
int cuDeviceGetName(char *s, int n, int d) { strncpy(s, "STUB", n); return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = contexts + d; return 0; }
static int owner;                                                              /* the process that has initialised: its children have not */
int cuCtxGetCurrent(void **c) { if (owner && owner != getpid()) return 3; *c = depth ? contexts + stack[depth - 1] : 0; return 0; }
int cuCtxGetDevice(int *d) { NEEDS_CONTEXT; *d = stack[depth - 1]; return 0; }
int cuCtxSetCurrent(void *c) { if (!c) depth -= depth > 0; else stack[depth ? depth - 1 : depth++] = (int *)c - contexts; return 0; }
int cuCtxPushCurrent_v2(void *c) { stack[depth++] = (int *)c - contexts; return 0; }
int cuCtxPopCurrent_v2(void **c) { NEEDS_CONTEXT; *c = contexts + stack[--depth]; return 0; }
int cuPointerGetAttribute(void *v, int a, uint64_t p) { *(int *)v = device_of(p); return 0; }

int cuInit(unsigned flags) { owner = getpid(); return 0; }

/* Memory */
int cuMemAlloc_v2(uint64_t *p, size_t n) {
  NEEDS_CONTEXT; UNSAFE;
  static uint64_t next[8];
  int d = stack[depth - 1];
  *p = FIRST + ((uint64_t)d << 40) + next[d];
  next[d] += (n + 65535) & ~65535ull;
  memory[memories++ % MOST] = (Memory){*p, n, 1};
  return 0;
}
int cuMemFree_v2(uint64_t p) {
  NEEDS_CONTEXT; UNSAFE;
  Memory *m = around(p);
  if (!m || m->at != p || !m->live) FAIL(1, "free of what is not allocated");
  m->live = 0;
  return 0;
}
static struct { char *at; size_t size; } pinned[MOST]; static int pins;
static int is_pinned(void *p) {
  for (int i = 0; i < pins; i++) if ((char *)p >= pinned[i].at && (char *)p < pinned[i].at + pinned[i].size) return 1;
  return 0;
}
int cuMemHostAlloc(void **p, size_t n, unsigned flags) { NEEDS_CONTEXT; UNSAFE; *p = calloc(1, n); pinned[pins].at = *p; pinned[pins++ % MOST].size = n; return 0; }
int cuMemFreeHost(void *p) { NEEDS_CONTEXT; UNSAFE; return 0; }
static int put(uint64_t to, size_t n, int s) {
  if (device_of(to) != streams[s].device) FAIL(1, "a copy to device %d on a stream of device %d", device_of(to), streams[s].device);
  if (around(to) && !around(to)->live) FAIL(700, "a copy to memory that is freed");
  int failed = enqueue(s);
  if (failed) return failed;
  if (!streams[s].captured) written[writes++ % MOST] = (Written){to, n, now, s};
  return 0;
}
/* of pageable memory: staged before it returns, but the last part may still be on its way in the default stream */
int cuMemcpyHtoD_v2(uint64_t to, void *from, size_t n) { NEEDS_CONTEXT; UNSAFE; return put(to, n, stream_of(0)); }
int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t n) { NEEDS_CONTEXT; UNSAFE; TRACE("back %zu\n", n); return enqueue(stream_of(0)); }
int cuMemsetD8_v2(uint64_t to, unsigned char c, size_t n) { NEEDS_CONTEXT; UNSAFE; return put(to, n, stream_of(0)); }
int cuMemsetD8Async(uint64_t to, unsigned char c, size_t n, void *s) { NEEDS_CONTEXT; return put(to, n, stream_of(s)); }
int cuMemcpyHtoDAsync_v2(uint64_t to, void *from, size_t n, void *s) {
  NEEDS_CONTEXT; TRACE("to the card %zu on %lx\n", n, (long)s);
  if (streams[stream_of(s)].captured && !is_pinned(from)) FAIL(900, "a captured copy from memory that is not pinned");
  return put(to, n, stream_of(s));
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t n, void *s) { NEEDS_CONTEXT; TRACE("from the card %zu on %lx\n", n, (long)s); return enqueue(stream_of(s)); }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t n, void *s) { NEEDS_CONTEXT; return put(to, n, stream_of(s)); }

/* Kernels; a function's handle says its device */
int cuLibraryLoadData(void **l, const void *c, void *a, void *b, unsigned n, void *e, void *f, unsigned m) { UNSAFE; loaded++; *l = (void *)0x1000; return 0; }
int cuLibraryGetKernel(void **k, void *l, const char *n) { *k = (void *)0x2000; return 0; }
int cuKernelGetFunction(void **f, void *k) { NEEDS_CONTEXT; *f = (void *)(0x4000l + loaded * 16 + stack[depth - 1]); return 0; }
int cuFuncSetAttribute(void *f, int a, int v) { NEEDS_CONTEXT;
  fprintf(stderr, "attribute %d = %d\n", a, v);
  return 0;
}
int cuCtxSetLimit(int limit, size_t n) { NEEDS_CONTEXT; fprintf(stderr, "limit %d = %zu\n", limit, n); return 0; }
int cuStreamSetAttribute(void *s, int a, void *v) { NEEDS_CONTEXT;                 /* accessPolicyWindow: base, bytes, hit ratio, two properties */
  if (!s || getenv("STUB_DIVIDED")) FAIL(1, "a window of L2 for %s", s ? "a part of a card" : "the default stream");
  fprintf(stderr, "stream attribute %d: %llx %zu %g\n", a, *(unsigned long long *)v, ((size_t *)v)[1], ((float *)v)[4]);
  return 0;
}
int cuTensorMapEncodeTiled(void *m, int type, unsigned rank, uint64_t at, uint64_t *sizes, uint64_t *strides, uint32_t *box, uint32_t *steps,
                           int interleave, int swizzle, int promotion, int fill) {
  static const int bytes[] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2};
  int size = bytes[type];
  fprintf(stderr, "tensor map of rank %u\n", rank);
  if ((uint64_t)m % 64) FAIL(1, "a tensor map at an address that 64 does not divide");
  if (at % 16 || rank < 3 || rank > 5) FAIL(1, "a tensor map of rank %u of an array at %llx", rank, (long long)at);
  for (unsigned i = 0; i < rank; i++) {
    if (!sizes[i] || sizes[i] > 1ull << 32 || !box[i] || box[i] > 256 || steps[i] != 1) FAIL(1, "size or box of axis %u", i);
    if (i + 1 < rank && (strides[i] % 16 || !strides[i] || strides[i] >= 1ull << 40)) FAIL(1, "a tensor map's stride of %lld bytes", (long long)strides[i]);
  }
  if (box[0] * size % 16 || (swizzle == 3 && box[0] * size > 128)) FAIL(1, "a box of %u bytes", box[0] * size);
  memset(m, 7, 128);
  return 0;
}
static int readable(uint64_t p, int s) {                                       /* what a launch on a stream reads through a pointer */
  Memory *m = around(p);
  if (p >= FIRST && p < FIRST + (8ull << 40) && device_of(p) != streams[s].device) FAIL(700, "a pointer to device %d in a launch on device %d", device_of(p), streams[s].device);
  if (m && !m->live) FAIL(700, "a pointer to memory that is freed");
  for (int i = writes < MOST ? writes : MOST; i--;) {
    Written *w = written + i;
    if (p < w->at || p >= w->at + w->size || w->stream == s || streams[s].captured) continue;
    if (w->number > streams[s].seen[w->stream] && w->number > host_seen[w->stream]) FAIL(700, "a launch that does not come after the copy of what it reads");
  }
  if (streams[s].captured)
    for (int i = writes < MOST ? writes : MOST; i--;)
      if (p >= written[i].at && p < written[i].at + written[i].size && written[i].number > host_seen[written[i].stream])
        FAIL(700, "a captured launch whose operand's copy is still under way");
  return 0;
}
static int launch(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                  void **parameters, unsigned width) { NEEDS_CONTEXT;
  int s = stream_of(stream), failed = enqueue(s);
  TRACE("kernel of %u blocks on %lx\n", gx * gy * gz, (long)stream);
  if (failed) return failed;
  if (!gx || !gy || !gz || gx >= 1u << 31 || gy > 65535 || gz > 65535) FAIL(1, "a grid of %u x %u x %u blocks", gx, gy, gz);
  long device = ((long)f - 0x4000) % 16;
  if (device != streams[s].device) FAIL(400, "a kernel of device %ld on a stream of device %d", device, streams[s].device);
  if (width && gx % width) FAIL(1, "a grid of %u blocks in clusters of %u", gx, width);
  for (int i = 0; i < 8 && parameters[i]; i++) {                                                /* the first are pointers, to tables too */
    uint64_t p = *(uint64_t *)parameters[i];
    if (p < FIRST || p >= FIRST + (8ull << 40)) break;
    if ((failed = readable(p, s))) return failed;
    if (streams[s].captured) { Graph *g = graphs + graph_count; g->pointers[g->count++] = p; }
  }
  if (launches++ < 8) fprintf(stderr, "launch grid %u %u %u block %u shared %u stream %ld first %llx\n", gx, gy, gz, bx, shared, (long)stream,
                           *(unsigned long long *)parameters[0]);
  return 0;
}

int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, void *stream,
                   void **parameters, void **extra) { return launch(f, gx, gy, gz, bx, by, bz, shared, stream, parameters, 0); }
typedef struct { unsigned grid[3], block[3], shared; void *stream; struct { int id, pad; unsigned value[16]; } *attributes; unsigned count; } Config;
int cuLaunchKernelEx(Config *c, void *f, void **parameters, void **extra) {
  unsigned width = 0;
  for (unsigned i = 0; i < c->count; i++) {
    unsigned *v = c->attributes[i].value;
    fprintf(stderr, "launch attribute %d = %u %u %u\n", c->attributes[i].id, v[0], v[1], v[2]);
    if (c->attributes[i].id == 4) width = v[0];                                 /* the cluster's dimensions */
  }
  return launch(f, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream, parameters, width);
}

/* Streams, events and graphs: what is asked for, in its order. */
int cuStreamCreate(void **s, unsigned flags) { NEEDS_CONTEXT; static long next = 0x5000; *s = (void *)(next += 0x10); TRACE("new stream %lx\n", next); stream_of(*s); return 0; }
int cuEventCreate(void **e, unsigned flags) { NEEDS_CONTEXT; static long next = 0x6000; *e = (void *)(next += 0x10); events[event_count++ % MOST].handle = next; return 0; }
static Event *event_of(void *e) { for (int i = 0; i < event_count; i++) if (events[i].handle == (uint64_t)e) return events + i; return events + MOST - 1; }
int cuEventRecord(void *e, void *stream) {
  int s = stream_of(stream);
  Event *x = event_of(e);
  TRACE("record %lx on %lx\n", (long)e, (long)stream);
  memcpy(x->seen, streams[s].seen, sizeof x->seen);
  x->seen[s] = now; x->captured = streams[s].captured; x->stream = s; x->recorded = 1; x->at = now; x->launches = launches;
  return 0;
}
int cuEventQuery(void *e) { UNSAFE; Event *x = event_of(e); return x->recorded && x->at > host_seen[x->stream] ? 600 : 0; }
int cuEventSynchronize(void *e) { UNSAFE; if (faulty()) return faulty(); Event *x = event_of(e); for (int i = 0; i < 64; i++) if (x->seen[i] > host_seen[i]) host_seen[i] = x->seen[i]; return 0; }
/* a millisecond for each launch between two events */
int cuEventElapsedTime(float *ms, void *a, void *b) { int n = event_of(b)->launches - event_of(a)->launches; *ms = n > 0 ? n : 1; return 0; }
int cuStreamWaitEvent(void *stream, void *e, unsigned flags) {
  int s = stream_of(stream);
  Event *x = event_of(e);
  TRACE("%lx waits for %lx\n", (long)stream, (long)e);
  if (streams[s].captured && !x->captured) { broken = 1; FAIL(905, "a captured stream waits for what is not captured"); }
  if (x->captured && !streams[s].captured) streams[s].captured = 1;            /* the capture takes this stream in */
  if (x->captured && s == capture_origin) streams[x->stream].unjoined = 0;
  for (int i = 0; i < 64; i++) if (x->seen[i] > streams[s].seen[i]) streams[s].seen[i] = x->seen[i];
  return 0;
}
int cuStreamSynchronize(void *stream) {
  int s = stream_of(stream);
  UNSAFE;
  if (faulty()) return faulty();
  TRACE("wait for %lx\n", (long)stream);
  if (streams[s].captured) { broken = 1; FAIL(900, "the host waits for a captured stream"); }
  for (int i = 0; i < 64; i++) if (streams[s].seen[i] > host_seen[i]) host_seen[i] = streams[s].seen[i];
  return 0;
}
int cuCtxSynchronize(void) { NEEDS_CONTEXT; if (faulty()) return faulty(); if (capture_origin >= 0) FAIL(900, "the host waits for a context with a captured stream"); for (int i = 0; i < 64; i++) host_seen[i] = now; return 0; }
int cuThreadExchangeStreamCaptureMode(int *mode) { int before = thread_mode; thread_mode = *mode; *mode = before; return 0; }
int cuStreamIsCapturing(void *s, int *status) { *status = streams[stream_of(s)].captured; return 0; }
int cuStreamBeginCapture_v2(void *s, int mode) {
  TRACE("begin capture on %lx\n", (long)s);
  if (!s) FAIL(900, "a capture of the default stream");
  capture_origin = stream_of(s); capture_mode = mode; mine = 1; broken = 0;
  streams[capture_origin].captured = 1; graphs[graph_count].count = 0;
  return 0;
}
int cuStreamEndCapture(void *s, void **g) {
  int unjoined = 0;
  TRACE("end capture\n");
  for (int i = 0; i < stream_count; i++) { unjoined |= streams[i].unjoined; streams[i].captured = streams[i].unjoined = 0; }
  capture_origin = -1; mine = 0;
  if (broken) FAIL(901, "a capture that was broken");
  if (unjoined) FAIL(904, "a captured stream that does not end in the first one");
  *g = (void *)(0x7100l + graph_count);
  return 0;
}
int cuGraphInstantiateWithFlags(void **x, void *g, unsigned long long flags) { graphs[graph_count].live = 1; *x = (void *)(0x7200l + graph_count++); return 0; }
int cuGraphExecDestroy(void *x) { graphs[(long)x - 0x7200].live = 0; return 0; }
int cuGraphLaunch(void *x, void *s) {
  Graph *g = graphs + ((long)x - 0x7200);
  TRACE("graph on %lx\n", (long)s);
  for (int i = 0; i < g->count; i++) if (around(g->pointers[i]) && !around(g->pointers[i])->live) FAIL(700, "a graph that reads what is freed");
  return enqueue(stream_of(s));
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
