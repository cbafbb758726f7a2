// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strings"
	"time"
)

// Perftest prints runs as linux-rdma/perftest 6 does, whose output scripts parse:
// src/perftest_parameters.{c,h}, RESULT_FMT and REPORT_FMT.
type Perftest struct {
	Out     io.Writer
	Params  Params
	Gbits   bool     // --report_gbits
	Devices []string // interfaces
	Mtu     int      // payload bytes a packet
	Paths   int      // of a queue pair
	// Checksum says whether UDP checksums are made and verified.
	Checksum bool
}

const (
	waitingBanner = "\n************************************\n" +
		"* Waiting for client to connect... *\n" +
		"************************************\n"

	bwHeader      = " #bytes     #iterations    BW peak[MiB/sec]    BW average[MiB/sec]   MsgRate[Mpps]"
	bwHeaderGbits = " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]"
	latHeader     = " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]" +
		"    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] "
	latDurationHeader = " #bytes        #iterations       t_avg[usec]    tps average"

	bwFormat = " %-7d    %-10d       %-7.2f            %-7.2f\t\t     %-7.6f"
	// Used below 0.1 Gb/sec, where two digits say nothing.
	bwFormatExact     = " %-7d    %d           %-7.6f            %-7.6f            %-7.6f"
	latFormat         = " %-7d %d          %-7.2f        %-7.2f      %-7.2f  \t       %-7.2f     \t%-7.2f\t\t%-7.2f \t\t%-7.2f"
	latDurationFormat = " %-7d       %d            %-7.2f        %-7.2f"
)

// rule is perftest's RESULT_LINE.
var rule = strings.Repeat("-", 87)

// Waiting is what a server prints before a client is there.
func (p *Perftest) Waiting() { fmt.Fprint(p.Out, waitingBanner) }

func (p *Perftest) testName() string {
	name := "RDMA_Write "
	if p.Params.Bidirectional {
		name += "Bidirectional "
	}
	if p.Params.Test == WriteLatTest {
		return name + "Latency Test"
	}
	return name + "BW Test"
}

// Preamble describes the run and its queue pairs.
func (p *Perftest) Preamble(local, remote []QPInfo) {
	var b strings.Builder
	fmt.Fprintln(&b, rule)
	fmt.Fprintf(&b, "                    %s\n", p.testName())
	fmt.Fprintf(&b, " Dual-port       : OFF\t\tDevice         : %s\n", strings.Join(p.Devices, ","))
	fmt.Fprintf(&b, " Number of qps   : %d\t\tTransport type : metaroce\n", p.Params.QPs)
	fmt.Fprintf(&b, " Connection type : RC\t\tUsing SRQ      : OFF\n")
	fmt.Fprintf(&b, " PCIe relax order: OFF\n")
	if p.Params.Test == WriteBWTest {
		fmt.Fprintf(&b, " TX depth        : %d\n", p.Params.Depth)
		fmt.Fprintf(&b, " CQ Moderation   : 1\n")
	} else {
		fmt.Fprintf(&b, " TX depth        : 1\n")
	}
	fmt.Fprintf(&b, " Mtu             : %d[B]\n", p.Mtu)
	fmt.Fprintf(&b, " Link type       : Ethernet\n")
	fmt.Fprintf(&b, " Paths a qp      : %d\n", p.Paths)
	fmt.Fprintf(&b, " UDP checksum    : %s\n", onOff(p.Checksum))
	fmt.Fprintf(&b, " Warm-up         : %v, not counted\n", p.Params.Warmup)
	if p.Params.Test == WriteLatTest {
		fmt.Fprintf(&b, " Latency is      : %s\n", p.latencyMeaning())
	}
	fmt.Fprintf(&b, " Max inline data : 0[B]\n")
	fmt.Fprintf(&b, " rdma_cm QPs\t : OFF\n")
	fmt.Fprintf(&b, " Data ex. method : Ethernet\n")
	fmt.Fprintln(&b, rule)
	for _, side := range []struct {
		name string
		qps  []QPInfo
	}{{"local", local}, {"remote", remote}} {
		for _, qp := range side.qps {
			fmt.Fprintf(&b, " %s address: LID 0000 QPN 0x%04x PSN 0x%06x RKey 0x%06x VAddr 0x%016x\n",
				side.name, qp.QPN, qp.PSN, qp.RKey, qp.Addr)
			fmt.Fprintf(&b, " GID: %s\n", gid(qp.GID))
		}
	}
	fmt.Fprintln(&b, rule)
	fmt.Fprintln(&b, p.header())
	fmt.Fprint(p.Out, b.String())
}

func (p *Perftest) latencyMeaning() string {
	if p.Params.Completion {
		return "post to completion"
	}
	return "half a ping-pong"
}

func onOff(on bool) string {
	if on {
		return "ON"
	}
	return "OFF"
}

// gid writes an address as perftest does: octets in decimal.
func gid(ip net.IP) string {
	octets := make([]string, 0, net.IPv6len)
	for _, octet := range ip.To16() {
		octets = append(octets, fmt.Sprintf("%02d", octet))
	}
	return strings.Join(octets, ":")
}

func (p *Perftest) header() string {
	switch {
	case p.Params.Test == WriteLatTest && p.Params.Duration > 0:
		return latDurationHeader
	case p.Params.Test == WriteLatTest:
		return latHeader
	case p.Gbits:
		return bwHeaderGbits
	}
	return bwHeader
}

// bwUnits turns bytes a second into the unit of the columns.
func (p *Perftest) bwUnits(bps float64) float64 {
	if p.Gbits {
		return bps * 8 / 1e9
	}
	return bps / (1 << 20)
}

func usec(ns float64) float64 { return ns / 1e3 }

// Row prints one result.
func (p *Perftest) Row(r Report) {
	switch {
	case r.BW != nil:
		format := bwFormat
		if p.Gbits && p.bwUnits(r.BW.Bps()) < 0.1 {
			format = bwFormatExact
		}
		fmt.Fprintf(p.Out, format+"\n", r.BW.Size, r.BW.Iterations,
			p.bwUnits(r.BW.PeakBps), p.bwUnits(r.BW.Bps()), r.BW.MsgRate()/1e6)
	case r.Lat != nil && p.Params.Duration > 0:
		fmt.Fprintf(p.Out, latDurationFormat+"\n", r.Lat.Size, r.Lat.Iterations, usec(r.Lat.AvgNs), r.Lat.Tps())
	case r.Lat != nil:
		l := r.Lat
		fmt.Fprintf(p.Out, latFormat+"\n", l.Size, l.Iterations, usec(l.MinNs), usec(l.MaxNs), usec(l.P50Ns),
			usec(l.AvgNs), usec(l.StdevNs), usec(l.P99Ns), usec(l.P999Ns))
	}
}

// End prints the last line.
func (p *Perftest) End() { fmt.Fprintln(p.Out, rule) }

type testInfo struct {
	Test           string `json:"test"`
	DualPort       string `json:"Dual_port"`
	Device         string `json:"Device"`
	QPs            int    `json:"Number_of_qps"`
	Transport      string `json:"Transport_type"`
	Connection     string `json:"Connection_type"`
	SRQ            string `json:"Using_SRQ"`
	RelaxedOrder   string `json:"PCIe_relax_order"`
	Depth          int    `json:"TX_depth"`
	CQModeration   int    `json:"CQ_Moderation"`
	Mtu            int    `json:"Mtu"`
	LinkType       string `json:"Link_type"`
	MaxInline      int    `json:"Max_inline_data"`
	RdmaCM         string `json:"rdma_cm_QPs"`
	DataExchange   string `json:"Data_ex_method"`
	Paths          int    `json:"Paths"`
	Checksum       string `json:"UDP_checksum"`
	WarmupUsec     int64  `json:"Warmup_usec"`
	LatencyMeaning string `json:"Latency_is,omitempty"`
}

type bwJSON struct {
	Size       uint64  `json:"MsgSize"`
	Iterations int     `json:"n_iterations"`
	Peak       float64 `json:"BW_peak"`
	Average    float64 `json:"BW_average"`
	MsgRate    float64 `json:"MsgRate"`
}

type latJSON struct {
	Size       uint64  `json:"MsgSize"`
	Iterations int     `json:"n_iterations"`
	Min        float64 `json:"t_min"`
	Max        float64 `json:"t_max"`
	Typical    float64 `json:"t_typical"`
	Avg        float64 `json:"t_avg"`
	Stdev      float64 `json:"t_stdev"`
	P99        float64 `json:"percentile_99"`
	P999       float64 `json:"percentile_99.9"`
}

type latDurationJSON struct {
	Size       uint64  `json:"MsgSize"`
	Iterations int     `json:"n_iterations"`
	Avg        float64 `json:"t_avg"`
	Tps        float64 `json:"tps_average"`
}

// JSON is what --out_json writes for one result: perftest's keys, quoted as its
// later versions do, and a few of ours in test_info.
func (p *Perftest) JSON(r Report) ([]byte, error) {
	info := testInfo{
		Test: strings.ReplaceAll(p.testName(), " ", "_"), DualPort: "OFF", Device: strings.Join(p.Devices, ","),
		QPs: p.Params.QPs, Transport: "metaroce", Connection: "RC", SRQ: "OFF", RelaxedOrder: "OFF",
		Depth: p.Params.Depth, CQModeration: 1, Mtu: p.Mtu, LinkType: "Ethernet", RdmaCM: "OFF", DataExchange: "Ethernet",
		Paths: p.Paths, Checksum: onOff(p.Checksum), WarmupUsec: p.Params.Warmup.Microseconds(),
	}
	var results any
	switch {
	case r.BW != nil:
		results = bwJSON{
			Size: r.BW.Size, Iterations: r.BW.Iterations,
			Peak: p.bwUnits(r.BW.PeakBps), Average: p.bwUnits(r.BW.Bps()), MsgRate: r.BW.MsgRate() / 1e6,
		}
	case r.Lat != nil && p.Params.Duration > 0:
		results = latDurationJSON{Size: r.Lat.Size, Iterations: r.Lat.Iterations, Avg: usec(r.Lat.AvgNs), Tps: r.Lat.Tps()}
	case r.Lat != nil:
		l := r.Lat
		results = latJSON{
			Size: l.Size, Iterations: l.Iterations, Min: usec(l.MinNs), Max: usec(l.MaxNs), Typical: usec(l.P50Ns),
			Avg: usec(l.AvgNs), Stdev: usec(l.StdevNs), P99: usec(l.P99Ns), P999: usec(l.P999Ns),
		}
	}
	if p.Params.Test == WriteLatTest {
		info.Depth, info.LatencyMeaning = 1, p.latencyMeaning()
	}
	b, err := json.MarshalIndent(struct {
		Info    testInfo `json:"test_info"`
		Results any      `json:"results"`
	}{info, results}, "", "\t")
	if err != nil {
		return nil, fmt.Errorf("report: %w", err)
	}
	return append(b, '\n'), nil
}

// DefaultWarmup is how long runs warm up: long enough for windows to open.
const DefaultWarmup = 200 * time.Millisecond
