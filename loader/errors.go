// SPDX-License-Identifier: Apache-2.0

package loader

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"
)

// Reasons that Load's errors wrap.
var (
	// ErrInUse: another metaroce process has the interface.
	ErrInUse = errors.New("interface in use")
	// ErrForeignProgram: an XDP program of somebody else is attached to the interface.
	ErrForeignProgram = errors.New("another XDP program is attached")
	// ErrUnsupported: the kernel or a driver lacks what the device needs.
	ErrUnsupported = errors.New("not supported")
	// ErrPermission: the process lacks a capability.
	ErrPermission = errors.New("permission denied")
)

// VerifierError says why the kernel refused a program. Its message is one line with the log's last
// lines; %+v prints the whole log.
type VerifierError struct {
	Err error // what the library said, names the program
	Log []string
}

// logTail is how many lines of the verifier's log the message has.
const logTail = 3

func (e *VerifierError) Error() string {
	var tail []string
	for i := len(e.Log) - 1; i >= 0 && len(tail) < logTail; i-- {
		line := strings.TrimSpace(e.Log[i])
		// Statistics come last and say nothing about the reason.
		if line == "" || strings.HasPrefix(line, "processed ") || strings.HasPrefix(line, "verification time") ||
			strings.HasPrefix(line, "stack depth") {
			continue
		}
		tail = append([]string{line}, tail...)
	}
	return fmt.Sprintf("the kernel's verifier refused a program: %s: %s", firstLine(e.Err.Error()), strings.Join(tail, "; "))
}

// Format prints the whole verifier log for %+v.
func (e *VerifierError) Format(f fmt.State, verb rune) {
	if verb == 'v' && f.Flag('+') {
		_, _ = fmt.Fprintf(f, "the kernel's verifier refused a program: %s\n\t%s", firstLine(e.Err.Error()), strings.Join(e.Log, "\n\t"))
		return
	}
	_, _ = fmt.Fprint(f, e.Error())
}

func (e *VerifierError) Unwrap() error { return e.Err }

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return s
}

// loadError turns the library's error into ours.
func loadError(err error) error {
	if ve, ok := errors.AsType[*ebpf.VerifierError](err); ok {
		return &VerifierError{Err: err, Log: ve.Log}
	}
	return fmt.Errorf("load the BPF programs: %s: %w", firstLine(err.Error()), rootErrno(err))
}

// rootErrno is the errno within err, or err itself: the library repeats its message otherwise.
func rootErrno(err error) error {
	if errno, ok := errors.AsType[unix.Errno](err); ok {
		return errno
	}
	return err
}
