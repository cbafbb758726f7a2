// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net/netip"
	"slices"
	"strings"

	"github.com/metaroce/metaroce/transport/core"
)

// Set-up messages travel over TCP, each as
//
//	"MROC" | version u16 | type u8 | length u32 | length bytes of JSON
//
// in big-endian order. These eleven bytes are the same in every version, so that
// two ends of different versions can tell each other so. Unknown JSON fields are
// ignored: later versions may add some without a new version number.
const (
	setupMagic   = "MROC"
	setupVersion = 1
	setupHeader  = 11
	maxSetupBody = 64 << 10 // bytes
)

type msgType uint8

const (
	msgHello    msgType = 1 // dialler: its endpoint
	msgAccept   msgType = 2 // listener: its endpoint, and it takes packets already
	msgReject   msgType = 3 // either, before Ready
	msgReady    msgType = 4 // dialler: it takes packets too
	msgClose    msgType = 5 // either: all that I posted is acknowledged
	msgCloseAck msgType = 6 // answer to Close
	msgAbort    msgType = 7 // either: my end of the connection failed
)

// String names the message.
func (t msgType) String() string {
	switch t {
	case msgHello:
		return "Hello"
	case msgAccept:
		return "Accept"
	case msgReject:
		return "Reject"
	case msgReady:
		return "Ready"
	case msgClose:
		return "Close"
	case msgCloseAck:
		return "CloseAck"
	case msgAbort:
		return "Abort"
	}
	return fmt.Sprintf("message %d", uint8(t))
}

// setupMsg is one message; which fields count depends on the type.
type setupMsg struct {
	Type     msgType
	Endpoint core.Endpoint // Hello, Accept
	Private  []byte        // Hello, Accept: at most core.MaxPrivate
	Reason   string        // Reject, Abort
	LastPSN  uint32        // Close, CloseAck: the psn after the last one sent
	WaitMs   uint32        // Close: how long its sender waits for the answer
	Flushed  uint32        // CloseAck: requests that were given up
}

const (
	// maxReason bounds, in bytes, what a peer may make us print.
	maxReason = 1024
	// maxWaitMs is how long this end works on the answer to Close, whatever the
	// peer says that it waits.
	maxWaitMs = 60_000
	// maxFlushed is more requests than a send queue holds.
	maxFlushed = 65_535
)

// The JSON bodies. Pointers tell an absent field from a zero.
type (
	planeJSON struct {
		Addr netip.Addr `json:"addr"`
		MTU  int        `json:"mtu"`
	}
	endpointJSON struct {
		QPN        *uint32     `json:"qpn"`
		Token      *uint32     `json:"token"`
		Payload    int         `json:"payload"`
		Paths      int         `json:"paths"`
		Checksum   *bool       `json:"checksum"`
		InitialPSN *uint32     `json:"initial_psn"`
		Planes     []planeJSON `json:"planes"`
		Private    []byte      `json:"private,omitempty"`
	}
	reasonJSON struct {
		Reason string `json:"reason"`
	}
	closeJSON struct {
		LastPSN *uint32 `json:"last_psn"`
		WaitMs  uint32  `json:"wait_ms,omitempty"`
		Flushed uint32  `json:"flushed,omitempty"`
	}
)

// appendMsg appends m as it goes over the wire to b.
func appendMsg(b []byte, m setupMsg) ([]byte, error) {
	body, err := marshalBody(m)
	if err != nil {
		return nil, err
	}
	if len(body) > maxSetupBody {
		return nil, fmt.Errorf("%v: %d bytes, at most %d fit", m.Type, len(body), maxSetupBody)
	}
	b = append(b, setupMagic...)
	b = binary.BigEndian.AppendUint16(b, setupVersion)
	b = append(b, byte(m.Type))
	b = binary.BigEndian.AppendUint32(b, uint32(len(body)))
	return append(b, body...), nil
}

func marshalBody(m setupMsg) ([]byte, error) {
	switch m.Type {
	case msgHello, msgAccept:
		if len(m.Private) > core.MaxPrivate {
			return nil, fmt.Errorf("private data of %d bytes, at most %d fit", len(m.Private), core.MaxPrivate)
		}
		e := m.Endpoint
		if err := checkEndpoint(e); err != nil {
			return nil, fmt.Errorf("%v: %w", m.Type, err)
		}
		j := endpointJSON{
			QPN: &e.QPN, Token: &e.Token, Payload: e.Payload, Paths: e.Paths,
			Checksum: &e.Checksum, InitialPSN: &e.InitialPSN, Private: m.Private,
		}
		for _, p := range e.Planes {
			j.Planes = append(j.Planes, planeJSON(p))
		}
		return json.Marshal(j)
	case msgReject, msgAbort:
		reason := strings.ToValidUTF8(m.Reason, "?")
		if len(reason) > maxReason {
			reason = strings.ToValidUTF8(reason[:maxReason], "")
		}
		return json.Marshal(reasonJSON{Reason: reason})
	case msgReady:
		return []byte("{}"), nil
	case msgClose, msgCloseAck:
		return json.Marshal(closeJSON{LastPSN: &m.LastPSN, WaitMs: m.WaitMs, Flushed: m.Flushed})
	}
	return nil, fmt.Errorf("no such set-up message: %v", m.Type)
}

// readMsg reads one message. An error of r is returned as it is; io.EOF means
// that r ended between messages.
func readMsg(r io.Reader) (setupMsg, error) {
	var h [setupHeader]byte
	// The magic on its own first: who is no metaroce peer need not have sent more.
	if n, err := io.ReadFull(r, h[:len(setupMagic)]); err != nil {
		if errors.Is(err, io.ErrUnexpectedEOF) {
			return setupMsg{}, fmt.Errorf("%w: ended after %q, want %q first", ErrNotMetaroce, h[:n], setupMagic)
		}
		return setupMsg{}, err
	}
	if string(h[:len(setupMagic)]) != setupMagic {
		return setupMsg{}, fmt.Errorf("%w: it sent %q first, want %q", ErrNotMetaroce, h[:len(setupMagic)], setupMagic)
	}
	if _, err := io.ReadFull(r, h[len(setupMagic):]); err != nil {
		return setupMsg{}, noEOF(err)
	}
	version := binary.BigEndian.Uint16(h[4:])
	typ := msgType(h[6])
	length := binary.BigEndian.Uint32(h[7:])
	if length > maxSetupBody {
		return setupMsg{}, fmt.Errorf("%v announces %d bytes, at most %d are allowed", typ, length, maxSetupBody)
	}
	// What is announced takes no memory before it comes.
	body, err := io.ReadAll(io.LimitReader(r, int64(length)))
	switch {
	case err != nil:
		return setupMsg{}, err
	case len(body) < int(length):
		return setupMsg{}, io.ErrUnexpectedEOF
	}
	if version != setupVersion {
		return setupMsg{}, &VersionError{Theirs: version, Ours: setupVersion}
	}
	m, err := unmarshalBody(typ, body)
	if err != nil {
		return setupMsg{}, fmt.Errorf("%v: %w", typ, err)
	}
	return m, nil
}

// noEOF makes an end inside a message an unexpected one.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func unmarshalBody(typ msgType, body []byte) (setupMsg, error) {
	m := setupMsg{Type: typ}
	switch typ {
	case msgHello, msgAccept:
		var j endpointJSON
		if err := json.Unmarshal(body, &j); err != nil {
			return m, err
		}
		switch {
		case j.QPN == nil:
			return m, errors.New("qpn is missing")
		case j.Token == nil:
			return m, errors.New("token is missing")
		case j.Checksum == nil:
			return m, errors.New("checksum is missing")
		case j.InitialPSN == nil:
			return m, errors.New("initial_psn is missing")
		case len(j.Private) > core.MaxPrivate:
			return m, fmt.Errorf("private data of %d bytes, at most %d are allowed", len(j.Private), core.MaxPrivate)
		}
		m.Endpoint = core.Endpoint{
			QPN: *j.QPN, Token: *j.Token, Payload: j.Payload, Paths: j.Paths,
			Checksum: *j.Checksum, InitialPSN: *j.InitialPSN,
		}
		for _, p := range j.Planes {
			m.Endpoint.Planes = append(m.Endpoint.Planes, core.PlaneAddr(p))
		}
		if len(j.Private) > 0 {
			m.Private = j.Private
		}
		return m, checkEndpoint(m.Endpoint)
	case msgReject, msgAbort:
		var j reasonJSON
		if err := json.Unmarshal(body, &j); err != nil {
			return m, err
		}
		if len(j.Reason) > maxReason {
			return m, fmt.Errorf("reason of %d bytes, at most %d are allowed", len(j.Reason), maxReason)
		}
		m.Reason = oneLine(j.Reason)
		return m, nil
	case msgReady:
		return m, json.Unmarshal(body, &struct{}{})
	case msgClose, msgCloseAck:
		var j closeJSON
		if err := json.Unmarshal(body, &j); err != nil {
			return m, err
		}
		if j.LastPSN == nil {
			return m, errors.New("last_psn is missing")
		}
		if j.Flushed > maxFlushed {
			return m, fmt.Errorf("flushed %d, want at most %d", j.Flushed, maxFlushed)
		}
		m.LastPSN, m.WaitMs, m.Flushed = *j.LastPSN, min(j.WaitMs, maxWaitMs), j.Flushed
		return m, nil
	}
	return m, fmt.Errorf("no such message in version %d", setupVersion)
}

// oneLine keeps a peer from writing control characters to our terminal.
func oneLine(s string) string {
	out := []rune(s)
	for i, r := range out {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) {
			out[i] = ' '
		}
	}
	return string(out)
}

// broadcast is the one IPv4 address that names everybody on every network.
var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// checkEndpoint refuses what no end of version 1 says.
func checkEndpoint(e core.Endpoint) error {
	switch {
	case e.QPN < 2 || e.QPN > 0xffffff: // 0 and 1 are InfiniBand's own
		return fmt.Errorf("qpn %d, want 2 to %d", e.QPN, 0xffffff)
	case e.Token == 0:
		return errors.New("token 0, want another")
	case !slices.Contains(core.Payloads[:], e.Payload):
		return fmt.Errorf("payload %d, want one of %v", e.Payload, core.Payloads)
	case e.Paths < 1 || e.Paths > core.MaxPaths:
		return fmt.Errorf("paths %d, want 1 to %d", e.Paths, core.MaxPaths)
	case len(e.Planes) < 1 || len(e.Planes) > core.MaxPlanes:
		return fmt.Errorf("%d planes, want 1 to %d", len(e.Planes), core.MaxPlanes)
	}
	for i, p := range e.Planes {
		if a := p.Addr; !a.IsValid() || a.IsUnspecified() || a.IsMulticast() || a.IsLoopback() || a == broadcast || a.Is4In6() || a.Zone() != "" {
			return fmt.Errorf("plane %d: address %q, want a plain unicast one", i, a)
		}
		if p.MTU < e.Payload || p.MTU > math.MaxUint16 {
			return fmt.Errorf("plane %d: MTU %d, want %d (the payload) to %d", i, p.MTU, e.Payload, math.MaxUint16)
		}
	}
	return nil
}
