// A learning switch that holds every frame for a while, for kernels without netem.
//
//     relay DELAY_US INTERFACE INTERFACE ...
//
// It prints "ready" when it listens and runs until it is killed. `tests/net.py` compiles it and starts it in the
// switch's namespace in place of a bridge. Every frame waits the same time, so one queue in the order of arrival keeps
// the order of every port. A full queue drops what comes, as a switch does.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netpacket/packet.h>
#include <poll.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>

enum { MAX_PORTS = 256, MAX_STATIONS = 1024, SLOTS = 1 << 14, FRAME_BYTES = 2048, SOCKET_BYTES = 8 << 20, TURN = 16 };

typedef struct {
    int64_t due_ns;
    int port, bytes; // port: where it came from
    unsigned char data[FRAME_BYTES];
} frame_t;

static struct pollfd ports[MAX_PORTS];
static int num_ports;
static struct {
    unsigned char mac[6];
    int port;
} stations[MAX_STATIONS];
static unsigned num_stations, head, tail; // frames wait in [head, tail)
static frame_t *queue;

static void fail(const char *what) {
    perror(what);
    exit(1);
}

static int64_t nanoseconds(struct timespec t) { return t.tv_sec * INT64_C(1000000000) + t.tv_nsec; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t); // the clock of the kernel's time stamps
    return nanoseconds(t);
}

static void open_port(const char *name) {
    const int fd = socket(AF_PACKET, SOCK_RAW, 0), on = 1, room = SOCKET_BYTES;
    if (fd < 0) fail("socket");
    struct sockaddr_ll where = {.sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL)};
    where.sll_ifindex = (int)if_nametoindex(name);
    if (!where.sll_ifindex) fail(name);
    if (setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof room)) fail("SO_RCVBUFFORCE");
    if (setsockopt(fd, SOL_SOCKET, SO_SNDBUFFORCE, &room, sizeof room)) fail("SO_SNDBUFFORCE");
    if (setsockopt(fd, SOL_SOCKET, SO_TIMESTAMPNS, &on, sizeof on)) fail("SO_TIMESTAMPNS");
    if (bind(fd, (struct sockaddr *)&where, sizeof where)) fail("bind");
    ports[num_ports++] = (struct pollfd){.fd = fd, .events = POLLIN};
}

// The port of a station, or -1.
static int port_of(const unsigned char *mac) {
    for (unsigned i = 0; i < num_stations && i < MAX_STATIONS; i++)
        if (!memcmp(stations[i].mac, mac, 6)) return stations[i].port;
    return -1;
}

static void learn(const unsigned char *mac, int port) {
    if (mac[0] & 1 || port_of(mac) == port) return;
    unsigned i = 0;
    while (i < num_stations && i < MAX_STATIONS && memcmp(stations[i].mac, mac, 6)) i++;
    if (i >= num_stations || i == MAX_STATIONS) i = num_stations++ % MAX_STATIONS; // full: the oldest gives way
    memcpy(stations[i].mac, mac, 6);
    stations[i].port = port;
}

// Takes one frame from a port into the queue. Returns 0 when there is none.
static int take(int port, int64_t delay_ns) {
    static frame_t dropped;
    frame_t *f = tail - head < SLOTS ? &queue[tail % SLOTS] : &dropped;
    char control[128];
    struct sockaddr_ll from;
    struct iovec part = {f->data, FRAME_BYTES};
    struct msghdr message = {.msg_name = &from, .msg_namelen = sizeof from, .msg_iov = &part, .msg_iovlen = 1};
    message.msg_control = control;
    message.msg_controllen = sizeof control;
    const ssize_t bytes = recvmsg(ports[port].fd, &message, MSG_DONTWAIT);
    if (bytes < 0) {
        if (errno == EAGAIN || errno == EINTR || errno == ENETDOWN) return 0; // ENETDOWN: told once when a link is cut
        fail("recvmsg");
    }
    if (from.sll_pkttype == PACKET_OUTGOING) return 1; // our own
    if (message.msg_flags & MSG_TRUNC) {
        fprintf(stderr, "a frame of more than %d bytes was dropped: an offload is still on\n", FRAME_BYTES);
        return 1;
    }
    if (bytes < ETH_HLEN || f == &dropped) return 1;
    const int64_t now = now_ns();
    int64_t came = now;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_TIMESTAMPNS) {
            struct timespec stamp;
            memcpy(&stamp, CMSG_DATA(c), sizeof stamp);
            came = nanoseconds(stamp);
        }
    f->due_ns = (came < now ? came : now) + delay_ns; // from when it came, not from when we woke up
    f->port = port;
    f->bytes = (int)bytes;
    learn(f->data + 6, port);
    tail++;
    return 1;
}

static void send_on(const frame_t *f) {
    const int to = f->data[0] & 1 ? -1 : port_of(f->data); // -1: a group or a stranger, to everyone
    for (int i = 0; i < num_ports; i++) {
        if (i == f->port || (to >= 0 && i != to)) continue;
        // a full queue, a shaped one too, or a link that is down: the frame is lost, as on a wire
        if (send(ports[i].fd, f->data, (size_t)f->bytes, MSG_DONTWAIT) < 0 && errno != EAGAIN && errno != ENOBUFS &&
            errno != ENETDOWN && errno != EINTR)
            fail("send");
    }
}

int main(int argc, char **argv) {
    if (argc < 3 || argc > MAX_PORTS + 2) {
        fprintf(stderr, "usage: relay DELAY_US INTERFACE ... (at most %d)\n", MAX_PORTS);
        return 2;
    }
    const int64_t delay_ns = (int64_t)(atof(argv[1]) * 1000);
    for (int i = 2; i < argc; i++) open_port(argv[i]);
    if (!(queue = calloc(SLOTS, sizeof *queue))) fail("calloc");
    // Precision under load: no timer slack, and ahead of the programs under test where that is allowed.
    prctl(PR_SET_TIMERSLACK, 1UL, 0, 0, 0);
    sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){.sched_priority = 1});
    puts("ready");
    fflush(stdout);
    for (;;) {
        while (head != tail && queue[head % SLOTS].due_ns <= now_ns()) send_on(&queue[head++ % SLOTS]);
        struct timespec wait = {0, 0};
        if (head != tail) {
            const int64_t left = queue[head % SLOTS].due_ns - now_ns();
            if (left > 0) wait = (struct timespec){left / 1000000000, left % 1000000000};
        }
        if (ppoll(ports, (nfds_t)num_ports, head == tail ? NULL : &wait, NULL) < 0 && errno != EINTR) fail("ppoll");
        for (int i = 0; i < num_ports; i++)
            for (int n = 0; ports[i].revents && n < TURN && take(i, delay_ns);) n++;
    }
}
