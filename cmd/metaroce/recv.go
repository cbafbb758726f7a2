// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/metaroce/metaroce/cmd/metaroce/internal/filecopy"
	"github.com/metaroce/metaroce/transport"
)

func init() { register(newRecvCommand) }

// maxSenders is how many may copy at the same time: each takes 4 MiB of memory.
const maxSenders = 16

func newRecvCommand() *cobra.Command {
	var flags copyFlags
	var once bool
	command := &cobra.Command{
		Use:   "recv DIR",
		Short: "Receive files by RDMA Write into a directory",
		Long: "recv takes files from `metaroce cp` until it is interrupted. A file appears in DIR when it\n" +
			"is complete, its SHA-256 is the sender's and it is on the disk; it replaces one of its name.\n" +
			"Whatever fails, nothing half-written is left.",
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := flags.check(); err != nil {
				return err
			}
			return runRecv(cmd, &flags, args[0], once)
		},
	}
	flags.register(command)
	command.Flags().BoolVar(&once, "once", false, "end after one sender, with its result")
	return command
}

// prepareDir checks the directory and removes what a killed predecessor left in it.
func prepareDir(dir string) error {
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if !info.IsDir() {
		return fmt.Errorf("%s is a file, want a directory", dir)
	}
	_, err = filecopy.CleanDir(dir)
	return err
}

// receiving is a running recv.
type receiving struct {
	cmd  *cobra.Command
	d    *transport.Device
	l    *transport.Listener
	dir  string
	idle time.Duration

	print   sync.Mutex // one line at a time
	senders sync.WaitGroup
	slots   chan struct{}
}

func runRecv(cmd *cobra.Command, flags *copyFlags, dir string, once bool) (err error) {
	if err := prepareDir(dir); err != nil {
		return err
	}
	if dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	ctx := cmd.Context()
	d, _, err := flags.open(ctx, nil)
	if err != nil {
		return err
	}
	defer closeDevice(d, &err)
	l, err := d.Listen(ctx, hostPort("", flags.port))
	if err != nil {
		return err
	}
	r := &receiving{cmd: cmd, d: d, l: l, dir: dir, idle: flags.idle, slots: make(chan struct{}, maxSenders)}
	defer r.senders.Wait()
	defer l.Close()
	fmt.Fprintf(cmd.OutOrStdout(), "receiving into %s, port %d\n", printName(dir), flags.port)
	for {
		in, err := r.next(ctx)
		switch {
		case interrupted(ctx):
			return nil
		case err != nil:
			return err
		case once:
			return r.serve(ctx, in)
		}
		select {
		case r.slots <- struct{}{}:
		default:
			_ = in.Reject(fmt.Sprintf("busy: %d senders are copying already", maxSenders))
			continue
		}
		r.senders.Go(func() {
			defer func() { <-r.slots }()
			if err := r.serve(ctx, in); err != nil {
				r.complain(err)
			}
		})
	}
}

// next waits for a sender; who is none is reported and forgotten.
func (r *receiving) next(ctx context.Context) (*transport.Incoming, error) {
	for {
		in, err := r.l.Accept(ctx)
		var bad *transport.HandshakeError
		if !errors.As(err, &bad) {
			return in, err
		}
		r.complain(err)
	}
}

func (r *receiving) complain(err error) {
	r.print.Lock()
	defer r.print.Unlock()
	fmt.Fprintln(r.cmd.ErrOrStderr(), "metaroce: "+oneLine(err))
}

// serve takes one sender's files.
func (r *receiving) serve(ctx context.Context, in *transport.Incoming) error {
	peer := in.RemoteAddr()
	s, err := filecopy.Accept(ctx, r.d, in, r.dir, r.idle)
	if err != nil {
		return fmt.Errorf("sender %v: %w", peer, err)
	}
	s.Received = func(f filecopy.File) {
		r.print.Lock()
		defer r.print.Unlock()
		printFile(r.cmd.OutOrStdout(), f)
	}
	err = s.Serve(ctx)
	if closeErr := s.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return fmt.Errorf("sender %v: %w", peer, err)
	}
	return nil
}
