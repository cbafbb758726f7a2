// SPDX-License-Identifier: Apache-2.0

package transport

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/metaroce/metaroce/transport/core"
)

func TestSetUpExchangesPrivateDataAndParameters(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, eb := newTestDevice(t, f)
	eb.payload = 3072
	eb.planes[0].MTU = 4000
	db.cfg.Paths = 3
	a, b := connect(t, da, db)
	if got := string(a.PeerPrivateData()); got != "from the listener" {
		t.Errorf("dialler got private data %q", got)
	}
	if got := string(b.PeerPrivateData()); got != "from the dialler" {
		t.Errorf("listener got private data %q", got)
	}
	ia, ib := a.Info(), b.Info()
	if ia.QPN != ib.PeerQPN || ib.QPN != ia.PeerQPN {
		t.Errorf("QPNs %d/%d and %d/%d do not match", ia.QPN, ia.PeerQPN, ib.QPN, ib.PeerQPN)
	}
	for _, i := range []ConnInfo{ia, ib} {
		if i.Payload != 1024 || len(i.Paths) != 3 || !i.Checksum {
			t.Errorf("payload %d, %d paths, checksum %v; want the smaller of each end: 1024, 3, true", i.Payload, len(i.Paths), i.Checksum)
		}
	}
}

func TestIncomingShowsPrivateDataBeforeAccept(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	l := listen(t, db)
	dialled := make(chan error, 1)
	private := bytes.Repeat([]byte{0xa5}, core.MaxPrivate)
	go func() {
		_, err := da.Dial(testCtx(t), l.Addr().String(), private)
		dialled <- err
	}()
	in, err := l.Accept(testCtx(t))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(in.PrivateData(), private) {
		t.Errorf("private data %x, want all 196 bytes", in.PrivateData())
	}
	if err := in.Reject("not today"); err != nil {
		t.Error(err)
	}
	var re *RejectedError
	if err := <-dialled; !errors.As(err, &re) || re.Reason != "not today" || re.Peer != l.Addr().String() {
		t.Errorf("Dial says %v, want a RejectedError with the reason", err)
	}
	eventually(t, "nothing is left in the engines", f.empty)
}

func TestPrivateDataOver196BytesIsRefused(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	if _, err := d.Dial(testCtx(t), "127.0.0.1:1", make([]byte, 197)); err == nil || !strings.Contains(err.Error(), "197 bytes") {
		t.Errorf("error %v, want one that names 197 bytes", err)
	}
}

// rawServer answers one caller by f.
func rawServer(t *testing.T, f func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		f(c)
	}()
	t.Cleanup(func() {
		l.Close()
		<-done
	})
	return l.Addr().String()
}

func TestDialNamesThePeersVersion(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	addr := rawServer(t, func(c net.Conn) {
		_, _ = readMsg(c)
		_, _ = c.Write(frame(9, msgReject, `{"reason":"?"}`))
	})
	_, err := d.Dial(testCtx(t), addr, nil)
	var ve *VersionError
	if !errors.As(err, &ve) || !strings.Contains(err.Error(), "peer speaks version 9, this is version 1") {
		t.Errorf("error %v, want a VersionError in so many words", err)
	}
}

func TestListenerNamesTheCallersVersionAndTellsIt(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	l := listen(t, d)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write(frame(9, msgHello, `{"qpn":1}`)); err != nil {
		t.Fatal(err)
	}
	header := make([]byte, setupHeader)
	if _, err := io.ReadFull(c, header); err != nil {
		t.Fatalf("the caller hears nothing: %v", err)
	}
	if v := binary.BigEndian.Uint16(header[4:]); string(header[:4]) != setupMagic || v != setupVersion {
		t.Errorf("the caller hears %q, want our version in a header", header)
	}
	c.Close()
	_, err = l.Accept(testCtx(t))
	var he *HandshakeError
	var ve *VersionError
	if !errors.As(err, &he) || !errors.As(err, &ve) || ve.Theirs != 9 {
		t.Errorf("Accept says %v, want a HandshakeError with a VersionError", err)
	}
	// The listener goes on.
	other, _ := newTestDevice(t, d.eng.(*fakeEngine).f)
	go func() {
		if in, err := l.Accept(testCtx(t)); err == nil {
			_ = in.Reject("fine")
		}
	}()
	var re *RejectedError
	if _, err := other.Dial(testCtx(t), l.Addr().String(), nil); !errors.As(err, &re) {
		t.Errorf("the next caller gets %v, want a RejectedError", err)
	}
}

func TestDialTellsWhatIsNoMetarocePeer(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	addr := rawServer(t, func(c net.Conn) { _, _ = c.Write([]byte("SSH-2.0-x\r\n")) })
	_, err := d.Dial(testCtx(t), addr, nil)
	if !errors.Is(err, ErrNotMetaroce) || !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), `"SSH-"`) {
		t.Errorf("error %v, want ErrNotMetaroce that names %s and what it sent", err, addr)
	}
}

func TestListenerTellsWhatIsNoMetarocePeer(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	l := listen(t, d)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := c.Write([]byte("GET / HTTP/1.1\r\n\r\n")); err != nil {
		t.Fatal(err)
	}
	_, err = l.Accept(testCtx(t))
	if !errors.Is(err, ErrNotMetaroce) || !strings.Contains(err.Error(), c.LocalAddr().String()) {
		t.Errorf("error %v, want ErrNotMetaroce that names the caller", err)
	}
}

func TestDialNamesThePeerThatIsNotThere(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := l.Addr().String()
	l.Close()
	_, err = d.Dial(testCtx(t), addr, nil)
	if err == nil || !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), "connection refused") || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %q, want one line that names %s and the refusal", err, addr)
	}
}

func TestListenNamesThePortThatIsTaken(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	addr := listen(t, d).Addr().String()
	_, err := d.Listen(testCtx(t), addr)
	if err == nil || !strings.Contains(err.Error(), addr) || !strings.Contains(err.Error(), "in use") || strings.Contains(err.Error(), "\n") {
		t.Errorf("error %q, want one line that names %s", err, addr)
	}
}

func TestDialRefusesAddressWithoutPort(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	if _, err := d.Dial(testCtx(t), "127.0.0.1", nil); err == nil || !strings.Contains(err.Error(), "host:port") {
		t.Errorf("error %v, want one that says host:port", err)
	}
}

func TestDialEndsWithItsContext(t *testing.T) {
	f := newFabric(t)
	d, _ := newTestDevice(t, f)
	release := make(chan struct{})
	addr := rawServer(t, func(net.Conn) { <-release })
	defer close(release)
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := d.Dial(ctx, addr, nil)
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), addr+" does not answer") {
		t.Errorf("error %v, want the context's that names %s", err, addr)
	}
	if !f.empty() {
		t.Error("a connection is left in the engine")
	}
}

func TestDialEndsWithItsDevice(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	said := make(chan struct{})
	release := make(chan struct{})
	addr := rawServer(t, func(c net.Conn) {
		_, _ = readMsg(c)
		close(said)
		<-release
	})
	defer close(release)
	got := make(chan error, 1)
	go func() {
		_, err := d.Dial(testCtx(t), addr, nil)
		got <- err
	}()
	<-said
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := <-got; !errors.Is(err, ErrClosed) {
		t.Errorf("Dial says %v, want ErrClosed", err)
	}
}

func TestEachEndHearsWhyTheOtherCannotStart(t *testing.T) {
	broken := errors.New("path 0: no route to 198.18.0.9")
	for _, tc := range []struct {
		name   string
		breaks func(ea, eb *fakeEngine)
		dial   bool // the dialler's error is a RejectedError, else the listener's
	}{
		{"listener's start", func(_, eb *fakeEngine) { eb.startErr = broken }, true},
		{"listener's table full", func(_, eb *fakeEngine) { eb.connErr = broken }, true},
		{"dialler's start", func(ea, _ *fakeEngine) { ea.startErr = broken }, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFabric(t)
			da, ea := newTestDevice(t, f)
			db, eb := newTestDevice(t, f)
			tc.breaks(ea, eb)
			l := listen(t, db)
			accepted := make(chan error, 1)
			go func() {
				in, err := l.Accept(testCtx(t))
				if err == nil {
					_, err = in.Accept(testCtx(t), nil)
				}
				accepted <- err
			}()
			_, dialErr := da.Dial(testCtx(t), l.Addr().String(), nil)
			mine, theirs := <-accepted, dialErr
			if !tc.dial {
				mine, theirs = theirs, mine
			}
			if !errors.Is(mine, broken) {
				t.Errorf("the end that cannot start says %v, want %v", mine, broken)
			}
			var re *RejectedError
			if !errors.As(theirs, &re) || !strings.Contains(re.Reason, broken.Error()) {
				t.Errorf("the other end says %v, want a RejectedError with the reason", theirs)
			}
			eventually(t, "nothing is left in the engines", f.empty)
		})
	}
}

func TestAcceptFailsWhenTheCallerHasGone(t *testing.T) {
	f := newFabric(t)
	d, _ := newTestDevice(t, f)
	l := listen(t, d)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write(mustAppend(t, setupMsg{Type: msgHello, Endpoint: testEndpoint()})); err != nil {
		t.Fatal(err)
	}
	in, err := l.Accept(testCtx(t))
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
	if _, err := in.Accept(testCtx(t), nil); err == nil || !strings.Contains(err.Error(), "hung up") {
		t.Errorf("error %v, want one that says hung up", err)
	}
	if !f.empty() {
		t.Error("a connection is left in the engine")
	}
}

func TestListenerCloseHangsUpOnSilentCallers(t *testing.T) {
	d, _ := newTestDevice(t, newFabric(t))
	l := listen(t, d)
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	waiting := make(chan error, 1)
	go func() {
		_, err := l.Accept(testCtx(t))
		waiting <- err
	}()
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if err := <-waiting; !errors.Is(err, ErrClosed) {
		t.Errorf("Accept says %v, want ErrClosed", err)
	}
	_ = c.SetReadDeadline(time.Now().Add(30 * time.Second))
	if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("the caller still waits")
	}
	if err := l.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestSilentVisitorsDoNotBlockTheListener(t *testing.T) {
	f := newFabric(t)
	da, _ := newTestDevice(t, f)
	db, _ := newTestDevice(t, f)
	l := listen(t, db)
	for range 5 {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	go func() {
		if in, err := l.Accept(testCtx(t)); err == nil {
			_ = in.Reject("seen")
		}
	}()
	var re *RejectedError
	if _, err := da.Dial(testCtx(t), l.Addr().String(), nil); !errors.As(err, &re) {
		t.Errorf("error %v, want a RejectedError", err)
	}
}

// A device's TCP connections are made in its namespace, whichever thread asks.
func TestSetUpStaysInTheDevicesNamespace(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root to make a network namespace")
	}
	var inside netNS
	made := make(chan error, 1)
	go func() {
		// The thread stays locked and ends with this goroutine.
		runtime.LockOSThread()
		made <- func() error {
			if _, err := netns.New(); err != nil {
				return err
			}
			lo, err := netlink.LinkByName("lo")
			if err != nil {
				return err
			}
			if err := netlink.LinkSetUp(lo); err != nil {
				return err
			}
			inside, err = currentNetNS()
			return err
		}()
	}()
	if err := <-made; err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	f := newFabric(t)
	outside, _ := newTestDevice(t, f)
	in1, _ := newTestDevice(t, f)
	in2, _ := newTestDevice(t, f)
	in1.ns.close()
	in1.ns = inside
	second, err := netns.GetFromPath(fmt.Sprintf("/proc/self/fd/%d", int(inside.handle)))
	if err != nil {
		t.Fatal(err)
	}
	in2.ns.close()
	in2.ns = netNS{handle: second}
	a, b := connect(t, in1, in2)
	if err := a.Close(testCtx(t)); err != nil {
		t.Error(err)
	}
	over(t, b)
	addr := listen(t, in1).Addr().String()
	if _, err := outside.Dial(testCtx(t), addr, nil); err == nil || !strings.Contains(err.Error(), "connection refused") {
		t.Errorf("from outside: %v, want connection refused", err)
	}
}
