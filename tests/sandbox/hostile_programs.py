"""Programs that try what a program must not do. Each prints `held` if it was stopped, or ends as the table says.

`refused` is for one attempt: it prints what happened if the attempt succeeded. `{canary}` is a directory outside with a file
`secret` in it, `{socket}` the name of an abstract Unix socket that somebody outside listens on, `{port}` a TCP port.
"""

PRELUDE = """
import ctypes, errno, mmap, os, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def refused(attempt, *arguments):
    try:
        result = attempt(*arguments)
    except (OSError, ValueError, MemoryError, RuntimeError):
        return print("held")
    print("ESCAPED:", repr(result)[:200])
def call(name, *arguments):
    ctypes.set_errno(0)
    result = getattr(libc, name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
def syscall(*arguments):
    return call("syscall", *arguments)
def all_of(*attempts):
    for attempt in attempts:
        try:
            result = attempt()
        except (OSError, ValueError):
            continue
        return print("ESCAPED:", repr(result)[:200])
    print("held")
"""

FILES = {
    "reads the password file": "refused(open, '/etc/passwd')",
    "writes the password file": "refused(open, '/etc/passwd', 'a')",
    "reads a secret by its path": "refused(open, '{canary}/secret')",
    "writes beside a secret": "refused(open, '{canary}/new', 'w')",
    "climbs up by dots": "refused(open, '../' * 30 + '{canary}/secret'.lstrip('/'))",
    "follows a link it made": "os.symlink('{canary}/secret', 'link'); refused(open, 'link')",
    "follows a chain of links": "os.symlink('/', 'a'); os.symlink('a/{canary}', 'b'); refused(open, 'b/secret')",
    "links a file of the library and writes it": "os.symlink(os.__file__, 'x'); refused(open, 'x', 'w')",
    "makes a hard link to the library": "refused(os.link, os.__file__, 'x')",
    "writes the library": "refused(open, os.__file__, 'a')",
    "deletes from the library": "refused(os.unlink, os.__file__)",
    "renames over the library": "open('x', 'w'); refused(os.rename, 'x', os.__file__)",
    "changes the mode of the library": "refused(os.chmod, os.__file__, 0o777)",
    "changes the owner of the library": "refused(os.chown, os.__file__, 1000, 1000)",
    "adds a module to the library": "refused(open, os.path.dirname(os.__file__) + '/mine.py', 'w')",
    "sees other packages": "print('held' if not os.path.isdir(os.path.dirname(os.__file__) + '/site-packages') or"
    " not os.listdir(os.path.dirname(os.__file__) + '/site-packages') else 'ESCAPED')",
    "finds the library mounted to write": "print('held' if os.statvfs(os.__file__).f_flag & os.ST_RDONLY else 'ESCAPED')",
    "finds its scratch mounted to execute": "flags = os.ST_NOEXEC | os.ST_NOSUID | os.ST_NODEV;"
    "print('held' if os.statvfs('.').f_flag & flags == flags else 'ESCAPED')",
    "writes the root": "refused(open, '/new', 'w')",
    "makes a directory in the root": "refused(os.mkdir, '/etc')",
    "replaces the link /tmp": "refused(os.unlink, '/tmp')",
    "removes its mount point": "refused(os.rmdir, '/scratch')",
    "reads its environment from /proc": "refused(open, '/proc/self/environ')",
    "goes through the root of process 1": "refused(os.listdir, '/proc/1/root')",
    "goes through its descriptors": "refused(os.listdir, '/proc/self/fd')",
    "finds an open descriptor": "all_of(*(lambda n=n: os.fstat(n) for n in range(3, 4096)))",
    "reads a kernel file": "refused(open, '/sys/kernel/notes', 'rb')",
    "reads physical memory": "refused(open, '/dev/mem', 'rb')",
    "reads the kernel log": "refused(open, '/dev/kmsg')",
    "opens a terminal": "all_of(lambda: open('/dev/tty'), lambda: open('/dev/ptmx'), lambda: open('/dev/console'))",
    "lists the root": "print('held' if not set(os.listdir('/')) & {{'etc', 'proc', 'sys', 'home', 'bin', 'var', 'run'}} else 'ESCAPED')",
    "finds what others left in /tmp": "print('held' if os.listdir('/tmp') == os.listdir('/dev/shm') == [] else 'ESCAPED')",
    "executes a shell": "refused(os.execv, '/bin/sh', ['sh', '-c', 'echo ESCAPED'])",
    "starts a subprocess": "import subprocess; refused(subprocess.check_output, ['/bin/cat', '{canary}/secret'])",
    "asks the system": "print('held' if os.system('echo ESCAPED') != 0 else 'ESCAPED')",
    "executes what it wrote": "open('x', 'w').write('#!/bin/sh'); os.chmod('x', 0o755); refused(os.execv, './x', ['x'])",
    "executes with a set-uid bit": "open('x', 'wb').write(b'\\x7fELF'); os.chmod('x', 0o4755); refused(os.execv, './x', ['x'])",
    "maps its own file to execute it": "f = open('x', 'w+b'); f.write(b'x' * 4096); f.flush();"
    "refused(mmap.mmap, f.fileno(), 4096, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC)",
    "opens a file by its handle": "refused(syscall, 304, -100, b'x' * 32, 0)",
}

NETWORK = {
    "opens an internet socket": "refused(socket.create_connection, ('127.0.0.1', {port}), 1)",
    "opens an internet socket, version 6": "refused(socket.socket, socket.AF_INET6)",
    "opens a raw socket": "refused(socket.socket, socket.AF_INET, socket.SOCK_RAW, 1)",
    "talks to the kernel by netlink": "refused(socket.socket, socket.AF_NETLINK, socket.SOCK_RAW, 0)",
    "reads packets": "refused(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)",
    "opens a socket to the hypervisor": "refused(socket.socket, socket.AF_VSOCK, socket.SOCK_STREAM)",
    "opens a socket by number": "refused(syscall, 41, 2, 1, 0)",
    "connects to an abstract socket": "s = socket.socket(socket.AF_UNIX); refused(s.connect, '\\0{socket}')",
    "connects to a socket in the file system": "s = socket.socket(socket.AF_UNIX); refused(s.connect, '{canary}/listener')",
    "fetches a page": "import urllib.request; refused(urllib.request.urlopen, 'http://127.0.0.1:{port}/', None, 1)",
    "resolves a name": "refused(socket.getaddrinfo, 'example.com', 80)",
}

PRIVILEGES = {
    "makes a user namespace": "refused(call, 'unshare', 0x10000000)",
    "makes a mount namespace": "refused(call, 'unshare', 0x20000)",
    "clones into a user namespace": "refused(syscall, 56, 0x10000000 | 17, 0, 0, 0, 0)",
    "clones by the newer call": "refused(syscall, 435, ctypes.create_string_buffer(struct.pack('8Q', 0x10000000, *[0] * 7)), 64)",
    "mounts a file system": "refused(call, 'mount', b'tmpfs', b'/scratch', b'tmpfs', 0, None)",
    "binds a directory": "os.mkdir('d'); refused(call, 'mount', b'/', b'/scratch/d', None, 4096, None)",
    "remounts the library to write": "refused(call, 'mount', None, os.path.dirname(os.__file__).encode(), None, 4096 | 32, None)",
    "unmounts its scratch": "refused(call, 'umount2', b'/scratch', 2)",
    "pivots the root": "refused(call, 'pivot_root', b'.', b'.')",
    "changes its root": "refused(os.chroot, '.')",
    "changes its root, by number": "os.mkdir('d'); refused(syscall, 161, b'd')",
    "enters a namespace": "refused(call, 'setns', 0, 0)",
    "becomes root": "refused(os.setuid, 0)",
    "becomes nobody": "refused(os.setresuid, 65534, 65534, 65534)",
    "joins the group of root": "refused(os.setgid, 0)",
    "takes more groups": "refused(os.setgroups, [0])",
    "takes capabilities": "header = (ctypes.c_uint32 * 2)(0x20080522, 0); refused(call, 'capset', header, (ctypes.c_uint32 * 6)(*[2**32 - 1] * 6))",
    "has capabilities": "header, held = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(); call('capget', header, held);"
    "print('held' if not any(held) else list(held))",
    "can be given new privileges": "print('held' if libc.prctl(39, 0, 0, 0, 0) == 1 else 'ESCAPED')",
    "is root already": "print('held' if os.getuid() == os.geteuid() == os.getgid() == 1000 else 'ESCAPED')",
    "names the host": "refused(socket.sethostname, 'mine')",
    "reads the host's name": "print('held' if socket.gethostname() == 'sandbox' else 'ESCAPED')",
    "makes a device": "refused(os.mknod, 'd', 0o600 | 0o060000, os.makedev(8, 0))",
    "makes a null device": "refused(os.mknod, 'd', 0o666 | 0o020000, os.makedev(1, 3))",
    "traces process 1": "refused(call, 'ptrace', 16, 1, 0, 0)",
    "traces its child": "pid = os.fork() or time.sleep(9); refused(call, 'ptrace', 16, pid, 0, 0)",
    "reads another process's memory": "refused(syscall, 310, 1, None, 0, None, 0, 0)",
    "signals its parent": "print('held' if os.getppid() == 0 else 'ESCAPED')",
    "signals its process group": "signal.signal(signal.SIGTERM, signal.SIG_IGN); os.kill(0, signal.SIGTERM); print('held')",
    "signals everybody": "signal.signal(signal.SIGTERM, signal.SIG_IGN); refused(os.kill, -1, signal.SIGKILL)",
    "signals by number": "all_of(*(lambda n=n: os.kill(n, signal.SIGKILL) for n in range(2, 40000)))",
    "sees another process": "all_of(*(lambda n=n: os.sched_getaffinity(n) for n in range(2, 5000)))",
    "signals the group of process 1 from a child": "os.fork() or os.kill(1, signal.SIGKILL) or os._exit(0); os.wait(); print('held')",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP); print('held')",
    "takes priority": "refused(os.setpriority, os.PRIO_PROCESS, 0, -20)",
    "takes real-time priority": "refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))",
    "raises its limits": "import resource; all_of(*(lambda n=n: resource.setrlimit(n, (2**40, 2**40)) for n in "
    "(resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC)))",
    "adds a key": "refused(syscall, 248, b'user', b'name', b'x', 1, -4)",
    "asks for a key": "refused(syscall, 249, b'user', b'name', None, 0)",
    "makes a keyring": "refused(syscall, 250, 1, None)",
    "loads a kernel program": "refused(syscall, 321, 0, b'\\0' * 128, 128)",
    "opens performance counters": "refused(syscall, 298, b'\\0' * 128, 0, -1, -1, 0)",
    "handles page faults": "refused(syscall, 323, 0)",
    "opens a ring": "refused(syscall, 425, 8, ctypes.create_string_buffer(256))",
    "makes a file in memory": "refused(os.memfd_create, 'x')",
    "makes shared memory": "refused(syscall, 29, 1234, 1 << 20, 0o1666)",
    "makes a semaphore": "refused(syscall, 64, 1234, 1, 0o1666)",
    "makes a message queue": "refused(syscall, 68, 1234, 0o1666)",
    "watches files": "refused(call, 'inotify_init')",
    "watches a whole file system": "refused(syscall, 300, 0, 0)",
    "sets the clock": "refused(time.clock_settime, time.CLOCK_REALTIME, 0.0)",
    "restarts the machine": "refused(syscall, 169, 0xfee1dead, 672274793, 0x1234567, None)",
    "loads a kernel module": "refused(syscall, 175, b'x', 1, b'')",
    "swaps to a file": "open('x', 'w'); refused(call, 'swapon', b'x', 0)",
    "changes its personality": "refused(syscall, 135, 0x0040000)",
    "accounts processes": "refused(call, 'acct', b'x')",
    "takes a descriptor of another process": "refused(syscall, 438, os.pidfd_open(os.getpid()), 0, 0)",
}

SECRETS = {
    "reads its environment": "print('held' if set(os.environ) <= {{'HOME', 'LANG', 'PATH', 'PYTHONHASHSEED', 'TMPDIR', 'LC_CTYPE'}} else dict(os.environ))",
    "searches its heap for a secret": "import gc; word = 'hunter' + '2'; found = [o for o in gc.get_objects() if isinstance(o, dict) and"
    " any(isinstance(v, str) and word in v and v is not __import__('__main__') for k, v in list(o.items()) if k != 'word')];"
    "print('held' if not [o for o in found if 'refused' not in o] else found)",
    "reads its command line": "print('held' if 'hunter' + '2' not in str(sys.orig_argv) + str(sys.argv) else 'ESCAPED')",
    "imports the package around it": "refused(lambda: __import__('importlib').reload(__import__('burnish')))"
    " if __import__('importlib.util').util.find_spec('burnish') else print('held')",
    "reads who is logged in": "refused(os.getlogin)",
    "reads its standard input for more": "print('held' if os.read(0, 100) == b'' else 'ESCAPED')",
}

RESOURCES = {
    "takes memory": "refused(lambda: bytearray(1 << 33))",
    "takes memory bit by bit": "def more(kept=[]):\n    while True: kept.append(bytearray(1 << 24))\nrefused(more)",
    "maps shared memory": "refused(lambda: mmap.mmap(-1, 1 << 33))",
    "maps shared memory that belongs to no file": "refused(mmap.mmap, -1, 4096)",
    "maps zeros to share them": "refused(lambda: mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096))",
    "maps huge pages": "refused(mmap.mmap, -1, 1 << 21, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)",
    "gives its pages to a pipe": "refused(syscall, 278, os.pipe()[1], struct.pack('PN', id(0), 8), 1, 0)",
    "has its children forgotten": "refused(signal.signal, signal.SIGCHLD, signal.SIG_IGN)",
    "locks memory": "refused(call, 'mlockall', 3)",
    "writes a huge file": "def fill():\n    with open('x', 'wb') as f:\n        while True: f.write(bytes(1 << 20))\nrefused(fill)",
    "writes many files of some size": "def fill():\n    for n in range(999):\n        with open(f'x{{n}}', 'wb') as f: f.write(bytes(1 << 20))\nrefused(fill)",
    "makes a sparse file": "refused(os.truncate, open('x', 'w').name, 1 << 40)",
    "makes a hole and writes behind it": "f = open('x', 'wb'); f.seek(1 << 40); refused(lambda: (f.write(b'x'), f.flush()))",
    "reserves a file": "refused(os.posix_fallocate, os.open('x', os.O_CREAT | os.O_RDWR), 0, 1 << 36)",
    "makes many files": "refused(lambda: [os.close(os.open(f'x{{n}}', os.O_CREAT)) for n in range(99999)])",
    "makes deep directories": "def deeper():\n    for n in range(99999): os.mkdir('d'); os.chdir('d')\nrefused(deeper)",
    "opens many descriptors": "refused(lambda: [os.open('/dev/null', 0) for _ in range(99999)])",
    "opens many pipes": "refused(lambda: [os.pipe() for _ in range(99999)])",
    "recurses without end": "def f(): return f()\ntry: f()\nexcept RecursionError: print('held')",
    "parses a deep structure": "import json\ntry: json.loads('[' * 10**6)\nexcept RecursionError: print('held')",
    "leaves a daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "        while True: time.sleep(99)\n    os._exit(0)\nos.wait(); print('held')",
    "leaves a child that holds its output": "if os.fork() == 0:\n    while True: time.sleep(99)\nprint('held')",
    "gives itself a name that is no text": "call('prctl', 15, b'\\xff) Z 1', 0, 0, 0); time.sleep(0.2); print('held')",
    "closes all descriptors": "print('held'); sys.stdout.flush(); os.closerange(0, 256)",
}

ENDS = {
    "starts threads without end": (
        "threading.stack_size(1 << 17); refused(lambda: [threading.Thread(target=time.sleep, args=(99,)).start() for _ in range(9999)])",
        "too many processes",
    ),
    "starts children without end": (
        "refused(lambda: [os.fork() or time.sleep(99) for _ in range(9999)]); time.sleep(99)",
        "too many processes",
    ),
    "unpacks a bomb": (
        "import zlib; small = zlib.compress(bytes(1 << 25), 1); kept = [zlib.decompress(small) for _ in range(99)]",
        "MemoryError|out of",
    ),
    "starts children from a thread": (
        "def go():\n    for _ in range(44): os.fork() or time.sleep(99)\n    time.sleep(99)\nthreading.Thread(target=go).start(); time.sleep(99)",
        "too many processes",
    ),
    "leaves zombies": (
        "refused(lambda: [os.fork() or os._exit(0) for _ in range(9999)]); time.sleep(99)",
        "too many processes",
    ),
    "bombs with forks": ("while True:\n    try: os.fork()\n    except OSError: pass", "out of|too many"),
    "burns time in children": ("for _ in range(4): os.fork()\nwhile True: pass", "out of|too many"),
    "burns time in threads": (
        "def spin():\n    while True: pass\nfor _ in range(8): threading.Thread(target=spin).start()",
        "out of|too many",
    ),
    "takes memory in children": (
        "for _ in range(6):\n    if os.fork() == 0:\n        kept = b'x' * (150 << 20)\n        time.sleep(99)\ntime.sleep(99)",
        "out of",
    ),
    "takes memory in children of a thread": (
        "def go():\n    for _ in range(4):\n        if os.fork() == 0:\n            kept = b'x' * (150 << 20)\n            time.sleep(99)\n    time.sleep(99)\n"
        "threading.Thread(target=go).start(); time.sleep(99)",
        "out of memory",
    ),
    "takes memory in children whose first thread has ended": (
        "def take():\n    time.sleep(0.1); kept = b'x' * (150 << 20); time.sleep(99)\n"
        "for _ in range(4):\n    if os.fork() == 0:\n        threading.Thread(target=take).start(); libc.syscall(60, 0)\n"
        "time.sleep(99)",
        "out of memory",
    ),
    "takes memory in children that fork and end all the time": (
        "for _ in range(5):\n    if os.fork() == 0:\n        kept = b'x' * (140 << 20)\n        while True: os.fork() and os._exit(0)\n"
        "while True:\n    try: os.wait()\n    except ChildProcessError: pass",
        "out of memory",
    ),
    "takes memory beside threads that start and end all the time": (
        "def start(): t = threading.Thread(target=int); t.start(); t.join()\n"
        "for _ in range(5):\n    if os.fork() == 0:\n        kept = b'x' * (140 << 20)\n        while True: start()\ntime.sleep(99)",
        "out of memory",
    ),
    "prints what is no text without end": ("while True: os.write(1, bytes([255]) * 65536)", "too much output"),
    "prints without end": ("while True: os.write(1, b'x' * 65536)", "too much output"),
    "prints errors without end": ("while True: os.write(2, b'x' * 65536)", "too much output"),
    "overflows the stack of C": (
        "sys.setrecursionlimit(10**9)\ndef f(_): return list(map(f, [1]))\nf(0)",
        "SIGSEGV|RecursionError|MemoryError",
    ),
    "computes a tower of powers": ("print(9**9**9)", "out of"),
    "sleeps and hears no signal": (
        "for n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n    except (OSError, ValueError): pass\nwhile True: time.sleep(99)",
        "out of time",
    ),
    "waits for a stopped child": (
        "pid = os.fork() or time.sleep(99)\nos.kill(pid, signal.SIGSTOP); os.wait()",
        "out of time",
    ),
    "waits for itself": ("r, w = os.pipe(); os.read(r, 1)", "out of time"),
    "exits at once with a good status": ("os._exit(0)", "wrong output"),
    "prints what it should not": ("print('held', 'not')", "wrong output"),
    "ends with a bad status": ("print('held'); sys.stdout.flush(); os._exit(3)", "status 3"),
    "calls the kernel by its old door": (
        "import platform\nassert platform.machine() == 'x86_64'\n"
        "code = bytes.fromhex('b814000000cd80c3')  # mov eax, 20; int 0x80; ret\n"
        "page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC); page.write(code)\n"
        "ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()\nprint('held')",
        "SIGSYS|AssertionError|SIGSEGV",
    ),
}

HELD = {**FILES, **NETWORK, **PRIVILEGES, **SECRETS, **RESOURCES}
