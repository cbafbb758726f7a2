// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"context"
	"encoding/binary"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/metaroce/metaroce/transport/core"
)

// exampleDevices stands in for Open: devices on a network that is memory.
func exampleDevices(n int) ([]*Device, error) {
	f := newFabric(nil)
	var all []*Device
	for i := range n {
		ns, err := currentNetNS()
		if err != nil {
			return nil, err
		}
		cfg, err := Config{Interfaces: []string{"eth1"}, Logger: slog.New(slog.DiscardHandler)}.withDefaults()
		if err != nil {
			return nil, err
		}
		e := &fakeEngine{f: f, payload: 1024, planes: []core.PlaneAddr{{Addr: netip.AddrFrom4([4]byte{198, 18, 0, byte(1 + i)}), MTU: 1500}}}
		all = append(all, newDevice(e, ns, cfg))
	}
	return all, nil
}

// A server lends one region to all its clients: their connections are in one
// protection domain. What is for one client alone is in the domain of that client's
// connection, and the others can do nothing with its key.
func ExamplePD() {
	ctx := context.Background()
	devices, err := exampleDevices(3)
	if err != nil {
		fmt.Println(err)
		return
	}
	server, clients := devices[0], devices[1:]
	defer func() {
		for _, d := range devices {
			d.Close()
		}
	}()

	shared, _ := server.AllocPD()
	board, _ := shared.AllocMemory(64, core.LocalWrite|core.RemoteWrite)
	listener, err := server.Listen(ctx, "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	keys := make(chan []byte, 1) // of what is not the clients'
	go func() {
		for range clients {
			in, err := listener.Accept(ctx)
			if err != nil {
				return
			}
			where := binary.BigEndian.AppendUint64(nil, board.Addr())
			_, _ = in.Accept(ctx, binary.BigEndian.AppendUint32(where, board.RKey()), WithPD(shared))
		}
		own, _ := server.AllocPD()
		secret, _ := own.AllocMemory(64, core.LocalWrite|core.RemoteWrite)
		where := binary.BigEndian.AppendUint64(nil, secret.Addr())
		keys <- binary.BigEndian.AppendUint32(where, secret.RKey())
	}()

	var conns []*Conn
	put := func(c *Conn, where []byte, offset uint64, text string) {
		mem, _ := c.PD().AllocMemory(64, core.LocalWrite)
		copy(mem.Bytes(), text)
		if err := c.PostWrite(WriteRequest{
			Local: mem, Length: uint64(len(text)),
			RemoteAddr: binary.BigEndian.Uint64(where) + offset, RKey: binary.BigEndian.Uint32(where[8:]),
		}); err != nil {
			fmt.Println(err)
			return
		}
		var done [1]Completion
		if _, err := c.SendCQ().Wait(ctx, done[:]); err != nil {
			fmt.Println(err)
			return
		}
		fmt.Printf("%q: %v\n", text, done[0].Status)
	}
	for i, d := range clients {
		c, err := d.Dial(ctx, listener.Addr().String(), nil)
		if err != nil {
			fmt.Println(err)
			return
		}
		conns = append(conns, c)
		put(c, c.PeerPrivateData(), uint64(8*i), fmt.Sprintf("client %d", i))
	}
	fmt.Printf("board: %s\n", board.Bytes()[:16])
	put(conns[1], <-keys, 0, "mischief")
	// Output:
	// "client 0": success
	// "client 1": success
	// board: client 0client 1
	// "mischief": remote access error
}
