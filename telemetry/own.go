// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"errors"
	"os"

	"github.com/metaroce/metaroce/loader"
)

// OwnPackets counts the data packets that the devices of this process have sent, and how many of these were
// repairs.
func OwnPackets() (sent, repairs uint64, err error) {
	devs, err := loader.Find()
	if err != nil {
		return 0, 0, err
	}
	for _, d := range devs {
		if d.Owner.PID != os.Getpid() {
			continue
		}
		s, err := loader.OpenPinned(d.Dir)
		if err != nil {
			return 0, 0, err
		}
		c, err := s.Counters()
		if err := errors.Join(err, s.Close()); err != nil {
			return 0, 0, err
		}
		sent += c.SentPkts
		repairs += c.Retransmits
	}
	return sent, repairs, nil
}
