// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// edges are the sizes at which packets begin and end, for a payload.
func edges(payload uint64) []uint64 {
	return []uint64{
		0, 1, payload - 1, payload, payload + 1, 2*payload + 1,
		64<<10 - 1, 64 << 10, 1<<20 + 3, 5, 0, 2 * payload,
	}
}

func TestMessagesOfEverySizeArriveWholeOverBothFamilies(t *testing.T) {
	l := newLab(t, lab.Config{Planes: 2})
	for _, c := range fewer(1, []struct {
		payload int
		ipv6    bool
	}{{1024, false}, {2048, false}, {2048, true}, {3072, false}, {3072, true}, {1024, true}}) {
		t.Run(fmt.Sprintf("payload %d, IPv6 %v", c.payload, c.ipv6), func(t *testing.T) {
			h := openPair(t, l, transport.Config{Payload: c.payload, PreferIPv6: c.ipv6})
			conn := connect(t, h[0], h[1], hardlyAny)
			if got := conn[0].Info(); got.Payload != c.payload || got.Paths[0].Local.Is6() != c.ipv6 {
				t.Fatalf("connection %+v, want payload %d, IPv6 %v", got, c.payload, c.ipv6)
			}
			exchange(t, bothWays(t, h, conn, uint64(c.payload), edges(uint64(c.payload)))...)
			exchange(t, acrossBlocks(t, h, conn))
		})
	}
}

func messageOf256MiBArrivesWhole(t *testing.T, h [2]*host) {
	size := pick[uint64](256<<20, 8<<20)
	c := connect(t, h[0], h[1], hardlyAny)
	exchange(t, newDirection(t, h[0], h[1], c[0], c[1], 9, []uint64{1, size, 1}))
}

// acrossBlocks prepares messages of a packet and a byte each, one for each place within the packet
// where a block of the target may end. Those of the sources end elsewhere.
func acrossBlocks(t *testing.T, h [2]*host, c [2]*transport.Conn) *direction {
	t.Helper()
	const block = 64 << 10
	payload := uint64(c[0].Info().Payload)
	d := newDirection(t, h[0], h[1], c[0], c[1], 4, nil)
	for k := uint64(0); k <= payload; k += pick(payload/1024, 37) {
		n := uint64(len(d.messages))
		d.messages = append(d.messages, message{
			size: payload + 1, imm: n%5 == 0,
			from: (n%8+1)*block - (k*7+payload/2)%payload,
			to:   (n+1)*block - k,
		})
	}
	d.from, d.to = h[0].alloc(t, 10*block), h[1].alloc(t, uint64(len(d.messages)+2)*block)
	d.want = make([]byte, len(d.to.Bytes()))
	d.refill(4)
	return d
}

func lastBytesOfARegionCanBeReadAndWritten(t *testing.T, h [2]*host) {
	c := connect(t, h[0], h[1], hardlyAny)
	for _, size := range []uint64{1, 3071, 3072, 64<<10 - 1, 64 << 10, 64<<10 + 1, 200000} {
		d := newDirection(t, h[0], h[1], c[0], c[1], size, nil)
		d.from, d.to = h[0].alloc(t, size), h[1].alloc(t, size)
		d.messages = []message{{size: size}}
		d.want = make([]byte, size)
		d.refill(size)
		exchange(t, d)
	}
}

func messageOf4GiBIsRefused(t *testing.T, h [2]*host) {
	c := connect(t, h[0], h[1], hardlyAny)
	from, to := h[0].alloc(t, 1), h[1].alloc(t, 1)
	for _, size := range []uint64{4 << 30, 4<<30 + 1, 1 << 40} {
		err := c[0].PostWrite(transport.WriteRequest{Local: from, Length: size, RemoteAddr: to.Addr(), RKey: to.RKey()})
		if !errors.Is(err, transport.ErrTooLong) {
			t.Errorf("write of %d bytes: %v, want %v", size, err, transport.ErrTooLong)
		}
	}
}

// TestOneDevicePair has what needs no device of its own: making one takes the verifier's time.
func TestOneDevicePair(t *testing.T) {
	// Tests with faults are none of the retry time.
	h := openPair(t, newLab(t, lab.Config{Planes: 4, Spines: 2, Seed: 7}), transport.Config{RetryTime: time.Minute})
	for _, c := range []struct {
		name string
		test func(*testing.T, [2]*host)
	}{
		{"MessageOf256MiBArrivesWhole", messageOf256MiBArrivesWhole},
		{"MessageOf4GiBIsRefused", messageOf4GiBIsRefused},
		{"LastBytesOfARegionCanBeReadAndWritten", lastBytesOfARegionCanBeReadAndWritten},
		{"ReceivePostedLateLetsTheSenderGoOn", receivePostedLateLetsTheSenderGoOn},
		{"SenderWithoutAReceiveStallsAndRetransmitsNothing", senderWithoutAReceiveStallsAndRetransmitsNothing},
		{"BufferThatIsWrittenWhileItIsSentMakesNoBadChecksum", bufferThatIsWrittenWhileItIsSentMakesNoBadChecksum},
		{"ConnectionsShareADevice", connectionsShareADevice},
		{"EveryByteArrivesOnceOverAFaultyNetwork", everyByteArrivesOnceOverAFaultyNetwork},
		{"PacketsThatAScriptHitsAreMadeGood", packetsThatAScriptHitsAreMadeGood},
		{"LostNAKIsRepeated", lostNAKIsRepeated},
		{"NumbersBeyondTheirBoundsAreNotBelieved", numbersBeyondTheirBoundsAreNotBelieved},
		{"PlaneThatGoesDownAndUpInMidTransferIsUsedAgain", planeThatGoesDownAndUpInMidTransferIsUsedAgain},
		{"PlaneThatIsDownFromTheBeginningIsDoneWithout", planeThatIsDownFromTheBeginningIsDoneWithout},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, h) })
	}
}

// postStalled posts the messages of a direction and waits until the sender stalls for want of a
// receive.
func postStalled(t *testing.T, d *direction) {
	t.Helper()
	for i := range d.messages {
		if err := d.post(i); err != nil {
			t.Fatal(err)
		}
	}
	waitFor(t, "sender stalled", func() bool { return d.a.register(t, d.src).NoCredit != 0 })
}

// retransmitted is how many packets a host has sent again on a connection.
func retransmitted(t *testing.T, h *host, c *transport.Conn) (n uint32) {
	t.Helper()
	r := h.register(t, c)
	for _, p := range r.Tx {
		n += p.Retx
	}
	return n
}

func receivePostedLateLetsTheSenderGoOn(t *testing.T, h [2]*host) {
	c := connect(t, h[0], h[1], hardlyAny)
	d := newDirection(t, h[0], h[1], c[0], c[1], 1, []uint64{100, 200, 10000, 300, 400, 20000})
	postStalled(t, d)
	time.Sleep(50 * time.Millisecond) // late: the sender's probes for credit have become rare
	ctx := bounded(t)
	if err := d.receive(ctx); err != nil {
		t.Fatal(err)
	}
	for i := range d.messages {
		if got := next(t, c[0].SendCQ()); got.WRID != uint64(i) || got.Status != core.StatusSuccess {
			t.Errorf("request %d ended with %v, want request %d to succeed", got.WRID, got.Status, i)
		}
	}
	wantEqual(t, "memory", d.to.Bytes(), d.want)
	wantNoMore(t, c[0].SendCQ(), c[1].RecvCQ())
}

func senderWithoutAReceiveStallsAndRetransmitsNothing(t *testing.T, h [2]*host) {
	c, other := connect(t, h[0], h[1], hardlyAny), connect(t, h[0], h[1], hardlyAny)
	d := newDirection(t, h[0], h[1], c[0], c[1], 1, []uint64{100, 200, 10000, 300})
	postStalled(t, d)
	// What was posted before the request that waits has been sent; it may still be under way.
	for i := range 2 {
		if got := next(t, c[0].SendCQ()); got.WRID != uint64(i) || got.Status != core.StatusSuccess {
			t.Errorf("request %d ended with %v, want request %d to succeed", got.WRID, got.Status, i)
		}
	}
	psn := h[0].register(t, c[0]).PsnNext
	again := retransmitted(t, h[0], c[0])
	exchange(t, bothWays(t, h, other, 2, mixed(2, pick[uint64](8<<20, 100<<10)))...)
	time.Sleep(300 * time.Millisecond)
	r := h[0].register(t, c[0])
	if r.PsnNext != psn || r.NoCredit == 0 || retransmitted(t, h[0], c[0]) != again {
		t.Errorf("while nothing was posted: next psn %d, no credit %d, %d retransmissions; want %d, 1, none",
			r.PsnNext, r.NoCredit, retransmitted(t, h[0], c[0])-again, psn)
	}
	wantNoMore(t, c[0].SendCQ(), c[1].RecvCQ())
	// Close waits for what was posted: let it go.
	if err := c[1].PostRecv(0); err != nil {
		t.Fatal(err)
	}
	for i := 2; i < len(d.messages); i++ {
		if got := next(t, c[0].SendCQ()); got.WRID != uint64(i) || got.Status != core.StatusSuccess {
			t.Errorf("request %d ended with %v, want request %d to succeed", got.WRID, got.Status, i)
		}
	}
	wantEqual(t, "memory", d.to.Bytes(), d.want)
}

func bufferThatIsWrittenWhileItIsSentMakesNoBadChecksum(t *testing.T, h [2]*host) {
	c := connect(t, h[0], h[1], hardlyAny)
	const size = 1 << 20
	from, to := h[0].alloc(t, size), h[1].alloc(t, size+2*guard)
	noise(to.Bytes(), 1)
	want := bytes.Clone(to.Bytes())
	before := h[1].counters(t)
	var stop atomic.Bool
	var writer sync.WaitGroup
	writer.Go(func() {
		words := unsafe.Slice((*uint64)(unsafe.Pointer(&from.Bytes()[0])), size/8)
		for v := uint64(0); !stop.Load(); v++ {
			for i := range words {
				atomic.StoreUint64(&words[i], v<<32|uint64(i))
			}
		}
	})
	defer writer.Wait()
	defer stop.Store(true)
	w := transport.WriteRequest{Local: from, Length: size, RemoteAddr: to.Addr() + guard, RKey: to.RKey()}
	for range pick(200, 10) {
		if err := c[0].PostWrite(w); err != nil {
			t.Fatal(err)
		}
		if got := next(t, c[0].SendCQ()); got.Status != core.StatusSuccess {
			t.Fatalf("write ended with %v: %v", got.Status, c[0].Err())
		}
	}
	after := h[1].counters(t)
	if n := after.DropChecksum - before.DropChecksum; n != 0 {
		t.Errorf("%d packets had a bad checksum, want none", n)
	}
	// Each aligned word is one that the application wrote at some time.
	got := to.Bytes()
	for i := range size / 8 {
		if v := binary.NativeEndian.Uint64(got[guard+8*i:]); uint32(v) != uint32(i) {
			t.Fatalf("word %d is %#x, which nobody wrote there", i, v)
		}
	}
	wantEqual(t, "guard before", got[:guard], want[:guard])
	wantEqual(t, "guard behind", got[guard+size:], want[guard+size:])
}

func connectionsShareADevice(t *testing.T, h [2]*host) {
	var all []*direction
	for i := range uint64(5) {
		c := connect(t, h[0], h[1], hardlyAny)
		if i%2 == 1 {
			c = connect(t, h[1], h[0], hardlyAny)
			c[0], c[1] = c[1], c[0]
		}
		all = append(all, bothWays(t, h, c, 10*i, mixed(i, pick[uint64](4<<20, 50<<10)))...)
	}
	exchange(t, all...)
}
