// SPDX-License-Identifier: Apache-2.0

package filecopy

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"strings"
	"time"
)

// Private data of both ends begins with magic and version. The version changes
// with anything in this file.
const (
	magic   = "MRCP"
	version = 1
)

// Bounds of the ring.
const (
	chunkBytes    = 256 << 10
	ringSlots     = 16
	maxSlots      = 64
	maxChunk      = 16 << 20
	replyBytes    = 1024 // of a slot for the receiver's answers
	maxReason     = 512  // bytes of a reason for giving up
	extraReceives = 8    // for answers that belong to no chunk
)

// kind is the top byte of an immediate; the rest is the chunk's number, which
// shows when the two ends do not mean the same one.
type kind uint32

// What a sender says.
const (
	kindOpen  kind = 1 // fileHeader
	kindData  kind = 2 // bytes of the file
	kindEnd   kind = 3 // SHA-256
	kindAbort kind = 4 // reason
)

// What a receiver says.
const (
	kindCredit  kind = 16 // nothing: the chunk was used
	kindDone    kind = 17 // SHA-256: the file is there; the end's credit, too
	kindFailed  kind = 18 // reason; the last thing it says
	kindWorking kind = 19 // nothing: it takes longer
)

const numberMask = 1<<24 - 1

func imm(k kind, number uint32) uint32 { return uint32(k)<<24 | number&numberMask }

func splitImm(v uint32) (kind, uint32) { return kind(v >> 24), v & numberMask }

// hello is the sender's private data: where answers go.
type hello struct {
	addr  uint64
	rkey  uint32
	slots uint16 // the most it can handle
}

// welcome is the receiver's: where chunks go.
type welcome struct {
	addr  uint64
	rkey  uint32
	chunk uint32 // bytes
	slots uint16
}

func prefix() []byte { return append([]byte(magic), 0, version) }

func (h hello) marshal() []byte {
	b := binary.BigEndian.AppendUint64(prefix(), h.addr)
	b = binary.BigEndian.AppendUint32(b, h.rkey)
	return binary.BigEndian.AppendUint16(b, h.slots)
}

func (w welcome) marshal() []byte {
	b := binary.BigEndian.AppendUint64(prefix(), w.addr)
	b = binary.BigEndian.AppendUint32(b, w.rkey)
	b = binary.BigEndian.AppendUint32(b, w.chunk)
	return binary.BigEndian.AppendUint16(b, w.slots)
}

// body checks magic, version and length of private data and returns the rest.
func body(b []byte, length int) ([]byte, error) {
	if len(b) < len(magic)+2 || string(b[:len(magic)]) != magic {
		return nil, fmt.Errorf("private data begins with %q, want %q: the other end is not metaroce cp or recv", b[:min(len(b), len(magic))], magic)
	}
	if v := binary.BigEndian.Uint16(b[len(magic):]); v != version {
		return nil, fmt.Errorf("cp protocol version %d, want %d", v, version)
	}
	if b = b[len(magic)+2:]; len(b) != length {
		return nil, fmt.Errorf("private data of %d bytes after the version, want %d", len(b), length)
	}
	return b, nil
}

func parseHello(b []byte) (hello, error) {
	b, err := body(b, 14)
	if err != nil {
		return hello{}, err
	}
	h := hello{addr: binary.BigEndian.Uint64(b), rkey: binary.BigEndian.Uint32(b[8:]), slots: binary.BigEndian.Uint16(b[12:])}
	if h.slots < 2 || h.slots > maxSlots {
		return hello{}, fmt.Errorf("%d slots, want 2 to %d", h.slots, maxSlots)
	}
	return h, nil
}

func parseWelcome(b []byte) (welcome, error) {
	b, err := body(b, 18)
	if err != nil {
		return welcome{}, err
	}
	w := welcome{
		addr: binary.BigEndian.Uint64(b), rkey: binary.BigEndian.Uint32(b[8:]),
		chunk: binary.BigEndian.Uint32(b[12:]), slots: binary.BigEndian.Uint16(b[16:]),
	}
	switch {
	case w.slots < 2 || w.slots > maxSlots:
		return welcome{}, fmt.Errorf("%d slots, want 2 to %d", w.slots, maxSlots)
	case w.chunk < 4096 || w.chunk > maxChunk:
		return welcome{}, fmt.Errorf("chunks of %d bytes, want 4096 to %d", w.chunk, maxChunk)
	}
	return w, nil
}

// fileHeader begins a file.
type fileHeader struct {
	Size    int64 // bytes
	Mode    uint32
	ModTime time.Time
	Name    string
}

const fileHeaderBytes = 8 + 4 + 8

func (h fileHeader) marshal() []byte {
	b := binary.BigEndian.AppendUint64(nil, uint64(h.Size))
	b = binary.BigEndian.AppendUint32(b, h.Mode)
	b = binary.BigEndian.AppendUint64(b, uint64(h.ModTime.UnixNano()))
	return append(b, h.Name...)
}

func parseFileHeader(b []byte) (fileHeader, error) {
	if len(b) < fileHeaderBytes {
		return fileHeader{}, fmt.Errorf("file header of %d bytes, want at least %d", len(b), fileHeaderBytes)
	}
	h := fileHeader{
		Size: int64(binary.BigEndian.Uint64(b)), Mode: binary.BigEndian.Uint32(b[8:]),
		ModTime: time.Unix(0, int64(binary.BigEndian.Uint64(b[12:]))), Name: string(b[fileHeaderBytes:]),
	}
	switch {
	case h.Size < 0:
		return fileHeader{}, fmt.Errorf("file size %d, want 0 or more", h.Size)
	case h.Mode&^0o777 != 0:
		return fileHeader{}, fmt.Errorf("file mode %#o, want permissions only", h.Mode)
	}
	return h, checkName(h.Name)
}

func parseSum(b []byte) (sum [sha256.Size]byte, err error) {
	if len(b) != len(sum) {
		return sum, fmt.Errorf("SHA-256 of %d bytes, want %d", len(b), len(sum))
	}
	copy(sum[:], b)
	return sum, nil
}

// printable makes a peer's words fit for a terminal, on one line.
func printable(b []byte) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r == 0x7f || r >= 0x80 && r < 0xa0 {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(b[:min(len(b), maxReason)]), "?"))
}
