// SPDX-License-Identifier: Apache-2.0

package xdp

import (
	"bytes"
	"testing"

	"github.com/metaroce/metaroce/transport/core"
)

func TestWriteLandsInThePeersMemoryAndCompletes(t *testing.T) {
	e := openPair(t, 1, Config{DSCP: 26})
	c := connect(t, e, 8)
	from, to := alloc(t, e[0], 1<<20+3), alloc(t, e[1], 1<<20+3)
	fill(from.Bytes(), 1)
	c[0].PostSend(0, write(from, to, 1<<20+3))
	if s := waitSend(t, c[0], 0); s != core.StatusSuccess {
		t.Fatalf("request ended with %v (%v)", s, c[0].Err())
	}
	if !bytes.Equal(from.Bytes(), to.Bytes()) {
		t.Error("the peer's memory differs from what was written")
	}
}
