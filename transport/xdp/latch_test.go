// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// bareConn is a connection whose words a test sets in the kernel's place.
func bareConn() *Conn { return &Conn{q: &loader.QPage{}, events: make(chan struct{}, 1)} }

// receive writes the record of receive n as mr_rx does.
func receive(c *Conn, n, psn, imm uint32) {
	r := &c.q.Rcq[n%core.RQDepth]
	r.Psn, r.Imm, r.Len = psn, imm, 5
	atomic.StoreUint64(&r.Valid, validWord(n))
}

func wantReceive(t *testing.T, c *Conn, n, imm uint32) {
	t.Helper()
	if r, ok := c.RecvDone(n); !ok || r.Imm != imm || r.Status != core.StatusSuccess {
		t.Errorf("receive %d: %+v, complete %v; want immediate %d", n, r, ok, imm)
	}
}

func TestReceiveThatNobodyPollsStaysComplete(t *testing.T) {
	c := bareConn()
	first := uint32(0xffffff00)
	c.PostRecv(3)
	receive(c, 0, first, 10)
	receive(c, 1, first+1, 11)
	atomic.StoreUint32(&c.q.RxCum, first+2)
	c.catchUp()
	// Writes without an immediate go on for more than half of all psns.
	for _, cum := range []uint32{first + 1<<30, first + 1<<31 + 1, first + 3<<30, first} {
		atomic.StoreUint32(&c.q.RxCum, cum)
		c.catchUp()
		wantReceive(t, c, 0, 10)
		wantReceive(t, c, 1, 11)
		if r, ok := c.RecvDone(2); ok {
			t.Errorf("receive 2 is complete with %+v, but nothing came", r)
		}
	}
	// It completes by and by, and those before it stay what they are.
	receive(c, 2, first, 12)
	atomic.StoreUint32(&c.q.RxCum, first+1)
	wantReceive(t, c, 2, 12)
	c.catchUp()
	wantReceive(t, c, 2, 12)
}

func TestReceiveWhosePacketsAreMissingIsNotLatched(t *testing.T) {
	c := bareConn()
	c.PostRecv(2)
	receive(c, 0, 100, 1) // arrived, but psn 99 has not
	atomic.StoreUint32(&c.q.RxCum, 99)
	receive(c, 1, 101, 2)
	c.catchUp()
	if _, ok := c.RecvDone(0); ok {
		t.Error("a receive is complete before all below its psn has arrived")
	}
	atomic.StoreUint32(&c.q.RxCum, 102)
	c.catchUp()
	wantReceive(t, c, 0, 1)
	wantReceive(t, c, 1, 2)
}

func TestLatchEndsAtWhatWasPosted(t *testing.T) {
	c := bareConn()
	// A queue page that claims everything: all records of a whole round look valid and old.
	for n := range uint32(core.RQDepth) {
		receive(c, n, 0, n)
	}
	atomic.StoreUint32(&c.q.RxCum, 1)
	c.PostRecv(core.RQDepth)
	c.catchUp()
	if got := c.latched.Load(); got != core.RQDepth {
		t.Errorf("%d receives latched, want %d", got, core.RQDepth)
	}
	// The slot of receive 128 still holds record 0.
	c.PostRecv(core.RQDepth + 1)
	c.catchUp()
	if _, ok := c.RecvDone(core.RQDepth); ok {
		t.Error("a receive is complete by an older record in its slot")
	}
}

// Between two looks more receives may come and go than there are slots.
func TestLatchCatchesUpWithReceivesThatWentByUnseen(t *testing.T) {
	c := bareConn()
	const many = 3*core.RQDepth + 7
	for n := range uint32(many) {
		c.PostRecv(n + 1)
		receive(c, n, n, n)
		atomic.StoreUint32(&c.q.RxCum, n+1)
		wantReceive(t, c, n, n) // polled at once
	}
	c.PostRecv(many + 1)
	receive(c, many, many, 77)
	atomic.StoreUint32(&c.q.RxCum, many+1)
	c.catchUp()
	atomic.StoreUint32(&c.q.RxCum, many+1<<31+1)
	wantReceive(t, c, many, 77)
	if _, ok := c.RecvDone(many + 1); ok {
		t.Error("a receive is complete that was not even posted")
	}
}

func TestConsumerWhoseEventWasLostIsWoken(t *testing.T) {
	send := func(c *Conn, msn, psn uint32) {
		s := &c.q.Scq[msn%core.SQDepth]
		s.LastPsn = psn
		atomic.StoreUint64(&s.Valid, validWord(msn))
	}
	for _, tc := range []struct {
		name string
		make func(c *Conn)
		want bool
	}{
		{"send complete and armed", func(c *Conn) {
			send(c, 0, 7)
			atomic.StoreUint32(&c.q.TxCum, 8)
			c.ArmSend(0)
		}, true},
		{"receive complete and armed", func(c *Conn) {
			c.PostRecv(1)
			receive(c, 0, 7, 0)
			atomic.StoreUint32(&c.q.RxCum, 8)
			c.ArmRecv(0)
		}, true},
		{"send refused by the peer", func(c *Conn) {
			send(c, 0, 7)
			atomic.StoreUint32(&c.q.TxCum, 7)
			atomic.StoreUint32(&c.q.NakPsn, 7)
			atomic.StoreUint32(&c.q.NakSyndrome, 0x62)
			c.ArmSend(0)
		}, true},
		{"complete, but nobody waits", func(c *Conn) {
			send(c, 0, 7)
			atomic.StoreUint32(&c.q.TxCum, 8)
		}, false},
		{"armed, but not complete", func(c *Conn) {
			send(c, 0, 7)
			atomic.StoreUint32(&c.q.TxCum, 7)
			c.ArmSend(0)
			c.PostRecv(1)
			c.ArmRecv(0)
		}, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := bareConn()
			tc.make(c)
			for i, want := range []bool{tc.want, false} { // once and no more
				c.catchUp()
				select {
				case <-c.Events():
					if !want {
						t.Errorf("look %d gives an event", i)
					}
				default:
					if want {
						t.Errorf("look %d gives no event", i)
					}
				}
			}
		})
	}
}

// mr_event was full: mr_notify has armed the consumer again, and no later packet tries once more.
func lostEventLeavesNobodyAsleep(t *testing.T, e [2]*Engine) {
	c := connect(t, e, 2)
	from, to := alloc(t, e[0], 100), alloc(t, e[1], 100)
	c[1].PostRecv(1)
	wr := write(from, to, 100)
	wr.Op = core.OpWriteImm
	c[0].PostSend(0, wr)
	wantStatus(t, c[0], 0, core.StatusSuccess)
	if _, ok := c[1].RecvDone(0); !ok {
		t.Fatal("the receive is not complete though the sender knows that it arrived")
	}
	c[0].ArmSend(0)
	c[1].ArmRecv(0)
	for i, who := range []string{"sender", "receiver"} {
		select {
		case <-c[i].Events():
		case <-time.After(20 * time.Second):
			t.Errorf("the %s sleeps", who)
		}
	}
}
