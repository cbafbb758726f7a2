// SPDX-License-Identifier: Apache-2.0

package transport_test

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/metaroce/metaroce/transport"
	"github.com/metaroce/metaroce/transport/core"
)

// One end lends memory and says where it is, the other end writes into it.
func Example() {
	ctx := context.Background()

	serve := func() error {
		dev, err := transport.Open(ctx, transport.Config{Interfaces: []string{"eth1", "eth2"}})
		if err != nil {
			return err
		}
		defer dev.Close()
		pd, err := dev.AllocPD()
		if err != nil {
			return err
		}
		mem, err := pd.AllocMemory(1<<20, core.LocalWrite|core.RemoteWrite)
		if err != nil {
			return err
		}
		listener, err := dev.Listen(ctx, ":18515")
		if err != nil {
			return err
		}
		peer, err := listener.Accept(ctx)
		if err != nil {
			return err
		}
		where := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(nil, mem.Addr()), mem.RKey())
		conn, err := peer.Accept(ctx, where, transport.WithPD(pd))
		if err != nil {
			return err
		}
		if err := conn.PostRecv(1); err != nil {
			return err
		}
		var done [1]transport.Completion
		if _, err := conn.RecvCQ().Wait(ctx, done[:]); err != nil {
			return err
		}
		fmt.Printf("%d bytes, immediate %d: %q\n", done[0].Length, done[0].Imm, mem.Bytes()[:done[0].Length])
		return conn.Close(ctx)
	}

	send := func(server string) error {
		dev, err := transport.Open(ctx, transport.Config{Interfaces: []string{"eth1", "eth2"}})
		if err != nil {
			return err
		}
		defer dev.Close()
		conn, err := dev.Dial(ctx, server+":18515", nil)
		if err != nil {
			return err
		}
		mem, err := conn.PD().AllocMemory(4096, core.LocalWrite)
		if err != nil {
			return err
		}
		where := conn.PeerPrivateData()
		n := copy(mem.Bytes(), "hello")
		err = conn.PostWriteImm(transport.WriteRequest{
			WRID: 1, Local: mem, Length: uint64(n),
			RemoteAddr: binary.BigEndian.Uint64(where), RKey: binary.BigEndian.Uint32(where[8:]),
		}, 42)
		if err != nil {
			return err
		}
		var done [1]transport.Completion
		if _, err := conn.SendCQ().Wait(ctx, done[:]); err != nil {
			return err
		}
		if done[0].Status != core.StatusSuccess {
			return fmt.Errorf("%v: %v", done[0].Op, done[0].Status)
		}
		return conn.Close(ctx)
	}

	_, _ = serve, send
}
