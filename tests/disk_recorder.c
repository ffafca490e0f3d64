/* A recorder of what a process does to the files below one directory: LD_PRELOAD puts it before the C library.

   CUES_RECORD_ROOT   the directory, an absolute path without links
   CUES_RECORD_LOG    the file to which it appends one record for each call that has changed something

   A record is a `struct head`, two paths and the bytes that were written (disk_states.py reads it). One lock is held
   around a call and its record, so the records of all threads are in the order of the calls. A file that is mapped for
   writing is compared with a copy of it before each record: each page that has changed becomes a record of its own.
   `record_mark(text)` puts a text of the program among the records.

   It does not see calls that the C library makes inside of itself (stdio), and system calls without the C library. The
   test compares what the records say with the files that the process left, so nothing is missed unseen.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE, MAPPED, SIZE, GROW, PUNCH, CREATE, MKDIR, RENAME, LINK, UNLINK, SYNC, MARK };
enum { AT_ONCE = 1 }; /* of a write: through a descriptor with O_DSYNC or O_SYNC */

struct head {
    uint32_t kind, flags;
    uint64_t inode, offset, length;
    uint32_t first, second; /* lengths of the two paths */
};

#define PAGE 4096
#define MAPS 32
static struct map { char *at, *copy; size_t length; uint64_t inode; off_t offset; char path[PATH_MAX]; } maps[MAPS];

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static char root[PATH_MAX];
static int log_fd = -1;

#define REAL(result, name, ...)                                        \
    static result (*real)(__VA_ARGS__);                                \
    if (!real) real = (result (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name)

static ssize_t put(int fd, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    return real(fd, parts, count);
}

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("CUES_RECORD_ROOT"), *log = getenv("CUES_RECORD_LOG");
    if (!where || !log) return;
    strncpy(root, where, sizeof root - 1);
    REAL(int, open, const char *, int, ...);
    log_fd = real(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
}

static int below(const char *path) {
    size_t n = strlen(root);
    return log_fd >= 0 && n && !strncmp(path, root, n) && path[n] == '/' && !strstr(path, "/lock.mdb");
}

static void record(uint32_t kind, uint32_t flags, uint64_t inode, uint64_t offset, uint64_t length, const char *first,
                   const char *second, const void *data) {
    struct head head = {kind, flags, inode, offset, length, strlen(first), strlen(second)};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)first, head.first}, {(void *)second, head.second},
                            {(void *)data, data ? length : 0}};
    size_t whole = sizeof head + head.first + head.second + (data ? length : 0);
    if (put(log_fd, parts, 4) != (ssize_t)whole) {
        fprintf(stderr, "disk_recorder: the record could not be written\n");
        abort();
    }
}

/* The bytes of a map that the file has: access to others is a SIGBUS. */
static size_t usable(struct map *map) {
    struct stat is;
    if (stat(map->path, &is) || is.st_ino != map->inode || is.st_size <= map->offset) return 0;
    size_t there = is.st_size - map->offset;
    return there < map->length ? there : map->length;
}

static void note_maps(void) {
    for (struct map *map = maps; map < maps + MAPS; map++) {
        size_t end = map->at ? usable(map) : 0;
        for (size_t at = 0; at < end; at += PAGE) {
            size_t n = end - at < PAGE ? end - at : PAGE;
            if (memcmp(map->at + at, map->copy + at, n)) {
                memcpy(map->copy + at, map->at + at, n);
                record(MAPPED, 0, map->inode, map->offset + at, n, "", "", map->copy + at);
            }
        }
    }
}

/* After a call that has changed a file: its map, if there is one, has changed by that call. */
static void accept_maps(uint64_t inode) {
    for (struct map *map = maps; map < maps + MAPS; map++)
        if (map->at && map->inode == inode) memcpy(map->copy, map->at, usable(map));
}

static void changed(uint32_t kind, uint32_t flags, uint64_t inode, uint64_t offset, uint64_t length, const char *first,
                    const char *second, const void *data) {
    record(kind, flags, inode, offset, length, first, second, data);
    accept_maps(inode);
}

/* The path of a descriptor; false for files of no interest. */
static int path_of(int fd, char *path, struct stat *is) {
    char link[64];
    int kept = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = log_fd < 0 ? -1 : readlink(link, path, PATH_MAX - 1);
    if (n > 0) path[n] = 0;
    int found = n > 0 && (below(path) || !strcmp(path, root)) && !fstat(fd, is);
    errno = kept;
    return found && (S_ISREG(is->st_mode) || S_ISDIR(is->st_mode));
}

static int resolve(int dir, const char *given, char *path) {
    char base[PATH_MAX] = "";
    if (log_fd < 0 || !given) return 0;
    if (given[0] != '/') {
        char link[64] = "/proc/self/cwd";
        if (dir != AT_FDCWD) snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, base, sizeof base - 2);
        if (n <= 0) return 0;
        strcpy(base + n, "/");
    }
    if (snprintf(path, PATH_MAX, "%s%s", base, given) >= PATH_MAX) return 0;
    return below(path);
}

#define LOCKED pthread_mutex_lock(&lock); note_maps()
#define DONE pthread_mutex_unlock(&lock)

/* --- bytes --- */

static void written(int fd, struct stat *is, off_t at, const struct iovec *parts, int count, ssize_t n) {
    int flags = fcntl(fd, F_GETFL) & (O_DSYNC | O_SYNC) ? AT_ONCE : 0;
    char *whole = malloc(n + 1);
    ssize_t done = 0;
    for (int i = 0; i < count && done < n; i++) {
        size_t part = (size_t)(n - done) < parts[i].iov_len ? (size_t)(n - done) : parts[i].iov_len;
        memcpy(whole + done, parts[i].iov_base, part);
        done += part;
    }
    changed(WRITE, flags, is->st_ino, at, n, "", "", whole);
    free(whole);
}

static off_t place(int fd, struct stat *is) {
    return fcntl(fd, F_GETFL) & O_APPEND ? is->st_size : lseek(fd, 0, SEEK_CUR);
}

#define WRITES(name, given, call, at_, parts_, count_)                 \
    ssize_t name given {                                               \
        char path[PATH_MAX];                                           \
        struct stat is;                                                \
        if (!path_of(fd, path, &is)) return call;                      \
        LOCKED;                                                        \
        fstat(fd, &is);                                                \
        off_t at = at_;                                                \
        ssize_t n = call;                                              \
        int kept = errno;                                              \
        if (n > 0) written(fd, &is, at, parts_, count_, n);            \
        DONE;                                                          \
        errno = kept;                                                  \
        return n;                                                      \
    }
#define ONE &(struct iovec){(void *)data, size}, 1
#define CALL(name, types, ...) ({ static ssize_t (*real) types; if (!real) real = (ssize_t (*) types)dlsym(RTLD_NEXT, #name); real(__VA_ARGS__); })

WRITES(write, (int fd, const void *data, size_t size), CALL(write, (int, const void *, size_t), fd, data, size), place(fd, &is), (&(struct iovec){(void *)data, size}), 1)
WRITES(pwrite, (int fd, const void *data, size_t size, off_t to), CALL(pwrite, (int, const void *, size_t, off_t), fd, data, size, to), to, (&(struct iovec){(void *)data, size}), 1)
WRITES(pwrite64, (int fd, const void *data, size_t size, off_t to), CALL(pwrite64, (int, const void *, size_t, off_t), fd, data, size, to), to, (&(struct iovec){(void *)data, size}), 1)
WRITES(writev, (int fd, const struct iovec *parts, int count), CALL(writev, (int, const struct iovec *, int), fd, parts, count), place(fd, &is), parts, count)
WRITES(pwritev, (int fd, const struct iovec *parts, int count, off_t to), CALL(pwritev, (int, const struct iovec *, int, off_t), fd, parts, count, to), to, parts, count)
WRITES(pwritev64, (int fd, const struct iovec *parts, int count, off_t to), CALL(pwritev64, (int, const struct iovec *, int, off_t), fd, parts, count, to), to, parts, count)

static void sized(uint64_t inode, off_t size) { changed(SIZE, 0, inode, 0, size, "", "", NULL); }

#define TRUNCATES(name)                                                \
    int f##name(int fd, off_t size) {                                  \
        REAL(int, f##name, int, off_t);                                \
        char path[PATH_MAX];                                           \
        struct stat is;                                                \
        if (!path_of(fd, path, &is)) return real(fd, size);            \
        LOCKED;                                                        \
        int failed = real(fd, size);                                   \
        if (!failed) sized(is.st_ino, size);                           \
        DONE;                                                          \
        return failed;                                                 \
    }                                                                  \
    int name(const char *given, off_t size) {                          \
        REAL(int, name, const char *, off_t);                          \
        char path[PATH_MAX];                                           \
        struct stat is;                                                \
        if (!resolve(AT_FDCWD, given, path)) return real(given, size); \
        LOCKED;                                                        \
        int failed = real(given, size);                                \
        if (!failed && !stat(path, &is)) sized(is.st_ino, size);       \
        DONE;                                                          \
        return failed;                                                 \
    }
TRUNCATES(truncate)
TRUNCATES(truncate64)

static void allocated(struct stat *is, int mode, off_t at, off_t size) {
    if (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)) changed(PUNCH, 0, is->st_ino, at, size, "", "", NULL);
    if (!(mode & FALLOC_FL_KEEP_SIZE)) changed(GROW, 0, is->st_ino, 0, at + size, "", "", NULL);
}

#define ALLOCATES(name, given, types, mode_, ...)                      \
    int name given {                                                   \
        REAL(int, name, types);                                        \
        char path[PATH_MAX];                                           \
        struct stat is;                                                \
        if (!path_of(fd, path, &is)) return real(__VA_ARGS__);         \
        LOCKED;                                                        \
        int failed = real(__VA_ARGS__);                                \
        if (!failed) allocated(&is, mode_, at, size);                  \
        DONE;                                                          \
        return failed;                                                 \
    }
#define COMMA ,
ALLOCATES(fallocate, (int fd, int mode, off_t at, off_t size), int COMMA int COMMA off_t COMMA off_t, mode, fd, mode, at, size)
ALLOCATES(fallocate64, (int fd, int mode, off_t at, off_t size), int COMMA int COMMA off_t COMMA off_t, mode, fd, mode, at, size)
ALLOCATES(posix_fallocate, (int fd, off_t at, off_t size), int COMMA off_t COMMA off_t, 0, fd, at, size)
ALLOCATES(posix_fallocate64, (int fd, off_t at, off_t size), int COMMA off_t COMMA off_t, 0, fd, at, size)

/* --- syncs --- */

#define SYNCS(name)                                                    \
    int name(int fd) {                                                 \
        REAL(int, name, int);                                          \
        char path[PATH_MAX];                                           \
        struct stat is;                                                \
        if (!path_of(fd, path, &is)) return real(fd);                  \
        LOCKED;                                                        \
        int failed = real(fd);                                         \
        if (!failed) record(SYNC, 0, is.st_ino, 0, 0, path, #name, NULL); \
        DONE;                                                          \
        return failed;                                                 \
    }
SYNCS(fsync)
SYNCS(fdatasync)

int msync(void *at, size_t length, int flags) {
    REAL(int, msync, void *, size_t, int);
    LOCKED;
    int failed = real(at, length, flags);
    for (struct map *map = maps; map < maps + MAPS; map++) /* LMDB syncs from the beginning of its map */
        if (!failed && flags & MS_SYNC && map->at == (char *)at)
            record(SYNC, 0, map->inode, 0, map->offset + length, map->path, "msync", NULL);
    DONE;
    return failed;
}

/* A copy of a map is as long as the map, and most of it is never touched: no memory is reserved for it. */
static void *unrecorded_map(void *wish, size_t length, int protection, int flags, int fd, off_t offset) {
    REAL(void *, mmap, void *, size_t, int, int, int, off_t);
    return real(wish, length, protection, flags, fd, offset);
}

static void mapped(void *at, size_t length, int protection, int flags, int fd, off_t offset) {
    struct map *map = maps;
    struct stat is;
    char path[PATH_MAX];
    if (at == MAP_FAILED || !(protection & PROT_WRITE) || !(flags & MAP_SHARED) || fd < 0) return;
    if (!path_of(fd, path, &is) || !S_ISREG(is.st_mode)) return;
    while (map < maps + MAPS && map->at) map++;
    if (map == maps + MAPS) abort();
    map->copy = unrecorded_map(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (map->copy == MAP_FAILED) {
        fprintf(stderr, "disk_recorder: no memory for a copy of %zu bytes of %s\n", length, path);
        abort();
    }
    map->length = length, map->inode = is.st_ino, map->offset = offset;
    strcpy(map->path, path);
    map->at = at;
    memcpy(map->copy, at, usable(map));
}

#define MAPS_(name)                                                                           \
    void *name(void *wish, size_t length, int protection, int flags, int fd, off_t offset) {  \
        REAL(void *, name, void *, size_t, int, int, int, off_t);                             \
        void *at = real(wish, length, protection, flags, fd, offset);                         \
        if (fd >= 0 && log_fd >= 0) {                                                         \
            pthread_mutex_lock(&lock);                                                        \
            mapped(at, length, protection, flags, fd, offset);                                \
            DONE;                                                                             \
        }                                                                                     \
        return at;                                                                            \
    }
MAPS_(mmap)
MAPS_(mmap64)

int munmap(void *at, size_t length) {
    REAL(int, munmap, void *, size_t);
    if (log_fd < 0) return real(at, length);
    pthread_mutex_lock(&lock);
    for (struct map *map = maps; map < maps + MAPS; map++)
        if (map->at && map->at == (char *)at) {
            note_maps();
            real(map->copy, map->length);
            map->at = NULL;
        }
    int failed = real(at, length);
    DONE;
    return failed;
}

/* --- names --- */

static int opened(int (*real)(int, const char *, int, ...), int dir, const char *given, int flags, mode_t mode) {
    char path[PATH_MAX];
    struct stat before, after;
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolve(dir, given, path)) return real(dir, given, flags, mode);
    LOCKED;
    int there = !lstat(path, &before);
    int fd = real(dir, given, flags, mode);
    int kept = errno;
    if (fd >= 0 && !fstat(fd, &after) && S_ISREG(after.st_mode)) {
        if (!there) changed(CREATE, 0, after.st_ino, 0, 0, path, "", NULL);
        else if (flags & O_TRUNC && before.st_size) sized(after.st_ino, 0);
    }
    DONE;
    errno = kept;
    return fd;
}

#define MODE                                                           \
    va_list rest;                                                      \
    va_start(rest, flags);                                             \
    mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
    va_end(rest)
static int real_openat(int dir, const char *path, int flags, ...) {
    REAL(int, openat, int, const char *, int, ...);
    MODE;
    return real(dir, path, flags, mode);
}
int open(const char *path, int flags, ...) { MODE; return opened(real_openat, AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE; return opened(real_openat, AT_FDCWD, path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE; return opened(real_openat, dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE; return opened(real_openat, dir, path, flags, mode); }
int creat(const char *path, mode_t mode) { return open(path, O_WRONLY | O_CREAT | O_TRUNC, mode); }

/* A call that changes one or two names; the record has the inode of the file that the first one names. */
static int named(uint32_t kind, int one, const char *first, int other, const char *second, int (*call)(void *), void *with) {
    char from[PATH_MAX] = "", to[PATH_MAX] = "";
    struct stat is;
    int inside = resolve(one, first, from), into = second && resolve(other, second, to);
    if (!inside && !into) return call(with);
    LOCKED;
    int there = !lstat(from, &is);
    int failed = call(with);
    int kept = errno;
    if (!failed && kind == MKDIR) there = !lstat(from, &is);
    if (!failed && there) record(kind, S_ISDIR(is.st_mode), is.st_ino, 0, 0, from, to, NULL);
    DONE;
    errno = kept;
    return failed;
}

struct two { int one; const char *first; int other; const char *second; int flags; };
static int do_rename(void *w) { struct two *t = w; REAL(int, renameat, int, const char *, int, const char *); return real(t->one, t->first, t->other, t->second); }
static int do_renameat2(void *w) { struct two *t = w; REAL(int, renameat2, int, const char *, int, const char *, unsigned); return real(t->one, t->first, t->other, t->second, t->flags); }
static int do_link(void *w) { struct two *t = w; REAL(int, linkat, int, const char *, int, const char *, int); return real(t->one, t->first, t->other, t->second, t->flags); }
static int do_unlink(void *w) { struct two *t = w; REAL(int, unlinkat, int, const char *, int); return real(t->one, t->first, t->flags); }
static int do_mkdir(void *w) { struct two *t = w; REAL(int, mkdirat, int, const char *, mode_t); return real(t->one, t->first, t->flags); }
#define NAMED(kind, call, a, b, c, d, e) { struct two t = {a, b, c, d, e}; return named(kind, a, b, c, d, call, &t); }

int rename(const char *a, const char *b) NAMED(RENAME, do_rename, AT_FDCWD, a, AT_FDCWD, b, 0)
int renameat(int x, const char *a, int y, const char *b) NAMED(RENAME, do_rename, x, a, y, b, 0)
int renameat2(int x, const char *a, int y, const char *b, unsigned flags) NAMED(RENAME, do_renameat2, x, a, y, b, (int)flags)
int link(const char *a, const char *b) NAMED(LINK, do_link, AT_FDCWD, a, AT_FDCWD, b, 0)
int linkat(int x, const char *a, int y, const char *b, int flags) NAMED(LINK, do_link, x, a, y, b, flags)
int unlink(const char *a) NAMED(UNLINK, do_unlink, AT_FDCWD, a, AT_FDCWD, NULL, 0)
int rmdir(const char *a) NAMED(UNLINK, do_unlink, AT_FDCWD, a, AT_FDCWD, NULL, AT_REMOVEDIR)
int unlinkat(int x, const char *a, int flags) NAMED(UNLINK, do_unlink, x, a, AT_FDCWD, NULL, flags)
int mkdir(const char *a, mode_t mode) NAMED(MKDIR, do_mkdir, AT_FDCWD, a, AT_FDCWD, NULL, (int)mode)
int mkdirat(int x, const char *a, mode_t mode) NAMED(MKDIR, do_mkdir, x, a, AT_FDCWD, NULL, (int)mode)

/* --- marks --- */

void record_mark(const char *text) {
    if (log_fd < 0) return;
    LOCKED;
    record(MARK, 0, 0, 0, 0, text, "", NULL);
    DONE;
}
