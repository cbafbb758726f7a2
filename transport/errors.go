// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"errors"
	"fmt"
	"io"

	"github.com/metaroce/metaroce/loader"
	"github.com/metaroce/metaroce/transport/core"
)

// Sentinels, for errors.Is.
var (
	// ErrClosed says that this end closed the device, listener, connection or memory.
	ErrClosed = errors.New("closed")
	// ErrPeerClosed says that the peer closed the connection in order: all that it
	// posted has arrived. It is io.EOF too.
	ErrPeerClosed error = peerClosedError{}
	// ErrPeerDied says that the peer's program is gone: its set-up connection
	// ended without the closing handshake.
	ErrPeerDied = errors.New("the peer's program is gone")
	// ErrQueueFull says that a queue holds as many requests as it can.
	ErrQueueFull = errors.New("queue full")
	// ErrConnFailed wraps the reason when CQ.Wait has nothing more to wait for.
	ErrConnFailed = errors.New("connection over")
	// ErrTooLong says that a message has 4 GiB or more.
	ErrTooLong = errors.New("message too long")
	// ErrBounds says that a request reaches outside its local memory.
	ErrBounds = errors.New("outside the memory region")
	// ErrMemoryInUse says that memory cannot be closed yet.
	ErrMemoryInUse = errors.New("memory in use")
	// ErrPDInUse says that a protection domain cannot be closed yet.
	ErrPDInUse = errors.New("protection domain in use")
	// ErrInterfaceInUse says that another metaroce process has the interface; the text has its pid.
	ErrInterfaceInUse = loader.ErrInUse
	// ErrForeignProgram says that somebody else's XDP program is attached there.
	ErrForeignProgram = loader.ErrForeignProgram
	// ErrUnsupported says that the kernel or a driver lacks something.
	ErrUnsupported = loader.ErrUnsupported
	// ErrPermission says which capability is missing.
	ErrPermission = loader.ErrPermission
	// ErrNotMetaroce says that what answered at the set-up port is something else.
	ErrNotMetaroce = errors.New("not a metaroce peer")
)

type peerClosedError struct{}

func (peerClosedError) Error() string        { return "closed by the peer" }
func (peerClosedError) Is(target error) bool { return target == io.EOF }

// RejectedError is what Dial returns when the listener's program said no, and
// Incoming.Accept when the dialler gave up on its own account.
type RejectedError struct {
	Peer   string // address of the set-up connection
	Reason string // the peer's words
}

func (e *RejectedError) Error() string {
	return fmt.Sprintf("%s rejected the connection: %s", e.Peer, e.Reason)
}

// VersionError says that the peer's set-up protocol has another version.
type VersionError struct {
	Peer         string
	Theirs, Ours uint16
}

func (e *VersionError) Error() string {
	return fmt.Sprintf("%s: peer speaks version %d, this is version %d", e.Peer, e.Theirs, e.Ours)
}

// HandshakeError is what Listener.Accept returns for a caller that did not get
// as far as an Incoming. The listener goes on listening.
type HandshakeError struct {
	Peer string
	Err  error
}

func (e *HandshakeError) Error() string { return fmt.Sprintf("set-up with %s: %v", e.Peer, e.Err) }

// Unwrap gives the reason.
func (e *HandshakeError) Unwrap() error { return e.Err }

// PeerFailedError says that the peer's end of the connection failed and told so.
type PeerFailedError struct {
	Peer   string
	Reason string // the peer's words
}

func (e *PeerFailedError) Error() string {
	return fmt.Sprintf("%s ended the connection: %s", e.Peer, e.Reason)
}

// RequestError is why a connection failed when one of its requests did.
type RequestError struct {
	WRID   uint64
	Op     core.Op
	Status core.Status
	Err    error // what the engine says of it, may be nil
}

func (e *RequestError) Error() string {
	s := fmt.Sprintf("request %d (%s): %v", e.WRID, e.Op, e.Status)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap gives Err.
func (e *RequestError) Unwrap() error { return e.Err }
