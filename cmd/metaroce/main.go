// SPDX-License-Identifier: Apache-2.0

// Command metaroce runs a software RDMA NIC for plain Ethernet: one binary,
// one file a subcommand.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
)

// commands holds the constructor of every subcommand; each subcommand's file adds its own.
var commands []func() *cobra.Command

// register adds a subcommand to the root command. It is called from init functions only.
func register(newCommand func() *cobra.Command) {
	commands = append(commands, newCommand)
}

func newRootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "metaroce",
		Short: "A software RDMA NIC for plain Ethernet",
		Long: "metaroce moves memory between hosts by RDMA Write through XDP programs, over many\n" +
			"paths, without an RDMA NIC, a kernel module or a lossless network.",
		SilenceUsage:       true,
		SilenceErrors:      true,
		DisableSuggestions: true,
	}
	for _, newCommand := range commands {
		root.AddCommand(newCommand())
	}
	return root
}

// run executes the command line args and returns the exit status.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	root := newRootCommand()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	if err := root.ExecuteContext(ctx); err != nil {
		fmt.Fprintln(stderr, "metaroce: "+oneLine(err))
		return 1
	}
	return 0
}

// oneLine keeps an error on one line, however many errors it joins: scripts read it.
func oneLine(err error) string {
	return strings.ReplaceAll(strings.TrimSpace(err.Error()), "\n", "; ")
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}
