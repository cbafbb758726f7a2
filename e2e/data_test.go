// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"errors"
	"fmt"
	"testing"

	"github.com/metaroce/metaroce/fabric/lab"
	"github.com/metaroce/metaroce/transport"
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
	for _, payload := range []int{1024, 2048, 3072} {
		for _, ipv6 := range []bool{false, true} {
			t.Run(fmt.Sprintf("payload %d, IPv6 %v", payload, ipv6), func(t *testing.T) {
				h := openPair(t, l, transport.Config{Payload: payload, PreferIPv6: ipv6})
				c := connect(t, h[0], h[1])
				if got := c[0].Info(); got.Payload != payload || got.Paths[0].Local.Is6() != ipv6 {
					t.Fatalf("connection %+v, want payload %d, IPv6 %v", got, payload, ipv6)
				}
				exchange(t, bothWays(t, h, c, uint64(payload), edges(uint64(payload)))...)
			})
		}
	}
}

func TestMessageOf4GiBIsRefused(t *testing.T) {
	h := openPair(t, newLab(t, lab.Config{Direct: true}), transport.Config{})
	c := connect(t, h[0], h[1])
	from, to := h[0].alloc(t, 1), h[1].alloc(t, 1)
	for _, size := range []uint64{4 << 30, 4<<30 + 1, 1 << 40} {
		err := c[0].PostWrite(transport.WriteRequest{Local: from, Length: size, RemoteAddr: to.Addr(), RKey: to.RKey()})
		if !errors.Is(err, transport.ErrTooLong) {
			t.Errorf("write of %d bytes: %v, want %v", size, err, transport.ErrTooLong)
		}
	}
}
