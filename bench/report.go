// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"fmt"
	"html/template"
	"io"
	"math"
	"strings"
	"time"
)

// WriteReport writes a story as one HTML page that needs nothing else: no
// script, no font, no picture from anywhere.
func WriteReport(w io.Writer, s *Story) error {
	if err := reportPage.Execute(w, s); err != nil {
		return fmt.Errorf("report: %w", err)
	}
	return nil
}

var reportPage = template.Must(template.New("report").Funcs(template.FuncMap{
	"gbps":    func(bps float64) string { return fmt.Sprintf("%.2f", bps/1e9) },
	"rate":    func(bps uint64) string { return fmt.Sprintf("%.4g Gbit/s", float64(bps)/1e9) },
	"usec":    func(ns float64) string { return formatUsec(ns) },
	"percent": percent,
	"ms":      func(d time.Duration) string { return fmt.Sprintf("%.0f ms", float64(d)/1e6) },
	"when":    func(t time.Time) string { return t.UTC().Format("2 January 2006, 15:04 UTC") },
	"onoff":   onOff,
	"goodput": goodputPlot, "latency": latencyPlot, "shares": sharesPlot, "pulled": pullPlot,
}).Parse(reportHTML))

const reportHTML = `<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>metaroce: RDMA Write through XDP</title>
<style>
:root { --ink: #1b1f24; --soft: #5b6470; --line: #d5dae0; --paper: #fff; --ours: #0b6bcb; --tcp: #c4622d; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ed; --soft: #9aa4b0; --line: #3a424c; --paper: #14181d; --ours: #5aa9f8; --tcp: #f0935c; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 56rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; margin-bottom: .2rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
p.note, figcaption { color: var(--soft); font-size: .9rem; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
figure { margin: 1rem 0; } svg { width: 100%; height: auto; display: block; }
svg text { font: 12px system-ui, sans-serif; fill: var(--soft); } svg text.v { fill: var(--ink); }
.ours { fill: var(--ours); } .tcp { fill: var(--tcp); }
.lours { stroke: var(--ours); } .ltcp { stroke: var(--tcp); } .lours, .ltcp { fill: none; stroke-width: 1.6; }
.axis { stroke: var(--line); stroke-width: 1; } .down { fill: var(--soft); opacity: .15; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin: 0 .3em 0 1em; }
</style>
</head>
<body>
<h1>RDMA Write through XDP</h1>
<p class="note">{{when .At}}. Two hosts, {{.Planes}} planes of {{rate .RateBps}} behind an XDP switch, on one machine.
One connection over {{.Paths}} paths, payload {{.Payload}} bytes a packet, UDP checksum {{onoff .Checksum}}, MTU {{.MTU}}.
Beside it, in the same run, through the same switch and with the same faults, kernel TCP: one connection a plane, ECN on, no TSO.
The switch's queues are virtual: they mark and drop what exceeds the rate, but hold nothing back, so that packets are
not delayed by them.</p>
<p class="note"><span class="key" style="background:var(--ours)"></span>metaroce
<span class="key" style="background:var(--tcp)"></span>TCP (no TSO)</p>

<h2>Goodput at random loss in both directions</h2>
<figure>{{goodput .}}<figcaption>Bytes that the application has, in Gbit/s.</figcaption></figure>
<table>
<tr><th>loss</th><th>transport</th><th>Gbit/s</th><th>p50 µs</th><th>p99 µs</th><th>sent again</th><th>of sent</th></tr>
{{range .Rows}}<tr><td>{{percent .Loss}}</td><td>{{.Transport}}</td><td>{{gbps .GoodputBps}}</td><td>{{usec .Latency.P50Ns}}</td><td>{{usec .Latency.P99Ns}}</td><td>{{.Again}}</td><td>{{percent .AgainShare}}</td></tr>
{{end}}</table>

<h2>How long 4 KiB take</h2>
<figure>{{latency .}}<figcaption>Logarithmic; bar: median, line: 99th percentile. metaroce: from post to completion, which says that the bytes are in the
other host's memory. TCP: until the other program has answered with 4 bytes.</figcaption></figure>

<h2>How the planes share the bytes</h2>
<figure>{{shares .}}<figcaption>One metaroce connection, packet by packet over all planes.</figcaption></figure>

<h2>A plane is pulled in mid-transfer</h2>
{{range .Pulls}}<figure>{{pulled .}}<figcaption>{{.Transport}}: {{gbps .BeforeBps}} Gbit/s before, {{gbps .DuringBps}} without the plane.
{{if .Recovered}}Back to 0.9 of what the other planes leave after {{ms .Recovery}}.{{else}}Not back to 0.9 of what the other planes leave before the plane was.{{end}}
{{if .Error}}The application saw: {{.Error}}.{{else}}The application noticed no error.{{end}}</figcaption></figure>
{{end}}
{{if .Direct}}<h2>Without switch and limits</h2>
<table>
<tr><th>pair</th><th>transport</th><th>Gbit/s</th><th>p50 µs</th><th>p99 µs</th></tr>
{{range .Direct}}<tr><td>{{if eq .Transport "TCP"}}without XDP, TSO on{{else}}with XDP{{end}}</td><td>{{.Transport}}</td><td>{{gbps .GoodputBps}}</td><td>{{usec .Latency.P50Ns}}</td><td>{{usec .Latency.P99Ns}}</td></tr>
{{end}}</table>{{end}}
<p class="note">Hosts share this machine's CPUs, so figures differ between machines and runs; what is compared ran within the same minute.</p>
</body>
</html>
`

func formatUsec(ns float64) string {
	switch us := ns / 1e3; {
	case us >= 1000:
		return fmt.Sprintf("%.0f", us)
	default:
		return fmt.Sprintf("%.1f", us)
	}
}

// class is a transport's style.
func class(transport string) string {
	if transport == TCPs {
		return "tcp"
	}
	return "ours"
}

const (
	plotWidth  = 720.0
	plotHeight = 240.0
	plotLeft   = 52.0
	plotRight  = plotWidth - 20
	plotBottom = 28.0
	plotTop    = 30.0
)

// plot is an SVG under construction. Only numbers and texts of this package go in.
type plot struct{ strings.Builder }

func newPlot(label string) *plot {
	p := &plot{}
	fmt.Fprintf(p, `<svg viewBox="0 0 %g %g" role="img" aria-label="%s">`, plotWidth, plotHeight, template.HTMLEscapeString(label))
	return p
}

func (p *plot) text(x, y float64, class, anchor, text string) {
	fmt.Fprintf(p, `<text x="%.1f" y="%.1f" class="%s" text-anchor="%s">%s</text>`, x, y, class, anchor, template.HTMLEscapeString(text))
}

func (p *plot) rect(class string, x, y, w, h float64) {
	fmt.Fprintf(p, `<rect class="%s" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`, class, x, y, max(w, 0), max(h, 0))
}

func (p *plot) line(class string, x1, y1, x2, y2 float64) {
	fmt.Fprintf(p, `<line class="%s" x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f"/>`, class, x1, y1, x2, y2)
}

func (p *plot) svg() template.HTML { return template.HTML(p.String() + "</svg>") }

// y is where a share of the axis lies.
func y(share float64) float64 {
	return plotHeight - plotBottom - share*(plotHeight-plotBottom-plotTop)
}

// scale draws a vertical axis from 0 to the next round value above top, and
// returns that.
func (p *plot) scale(top float64, unit string) float64 {
	if !(top > 0) {
		top = 1
	}
	step := math.Pow(10, math.Floor(math.Log10(top)))
	for _, f := range []float64{0.2, 0.25, 0.5, 1, 2, 2.5} {
		if top/(step*f) <= 5 {
			step *= f
			break
		}
	}
	limit := math.Ceil(top*1.02/step) * step
	for v := 0.0; v <= limit*1.001; v += step {
		p.line("axis", plotLeft, y(v/limit), plotRight, y(v/limit))
		p.text(plotLeft-6, y(v/limit)+4, "", "end", fmt.Sprintf("%.4g", v))
	}
	p.text(2, 12, "", "start", unit)
	return limit
}

// groups calls f with the place of each row's bar, rows of one loss side by side.
func groups(rows []Row, f func(r Row, x, w float64), label func(x float64, loss float64)) {
	var losses []float64
	for _, r := range rows {
		if len(losses) == 0 || losses[len(losses)-1] != r.Loss {
			losses = append(losses, r.Loss)
		}
	}
	group := (plotRight - plotLeft) / float64(max(len(losses), 1))
	bar := group * 0.28
	for i, loss := range losses {
		left := plotLeft + group*float64(i)
		label(left+group/2, loss)
		n := 0
		for _, r := range rows {
			if r.Loss == loss {
				f(r, left+group*0.2+float64(n)*bar*1.1, bar)
				n++
			}
		}
	}
}

func goodputPlot(s *Story) template.HTML {
	p := newPlot("goodput in Gbit/s by loss")
	top := 0.0
	for _, r := range s.Rows {
		top = max(top, r.GoodputBps/1e9)
	}
	limit := p.scale(top, "Gbit/s")
	groups(s.Rows, func(r Row, x, w float64) {
		v := r.GoodputBps / 1e9
		p.rect(class(r.Transport), x, y(v/limit), w, y(0)-y(v/limit))
		p.text(x+w/2, y(v/limit)-4, "v", "middle", fmt.Sprintf("%.2f", v))
	}, p.lossLabel)
	return p.svg()
}

func (p *plot) lossLabel(x, loss float64) {
	p.text(x, plotHeight-8, "", "middle", percent(loss)+" loss")
}

// formatDecade writes a power of ten, in ns, with its unit.
func formatDecade(ns float64) string {
	for _, u := range []struct {
		ns   float64
		unit string
	}{{1e9, "s"}, {1e6, "ms"}, {1e3, "µs"}} {
		if ns >= u.ns {
			return fmt.Sprintf("%g %s", ns/u.ns, u.unit)
		}
	}
	return fmt.Sprintf("%g ns", ns)
}

func latencyPlot(s *Story) template.HTML {
	p := newPlot("latency of 4 KiB in microseconds by loss, logarithmic")
	least, most := math.Inf(1), 0.0
	for _, r := range s.Rows {
		if r.Latency.Iterations > 0 {
			least, most = min(least, r.Latency.P50Ns), max(most, r.Latency.P99Ns)
		}
	}
	if most == 0 {
		least, most = 1e3, 1e4
	}
	low, high := math.Floor(math.Log10(least)), math.Ceil(math.Log10(most))
	if low == high {
		high++
	}
	place := func(ns float64) float64 { return (math.Log10(max(ns, 1)) - low) / (high - low) }
	for e := low; e <= high; e++ {
		at := y((e - low) / (high - low))
		p.line("axis", plotLeft, at, plotRight, at)
		p.text(plotLeft-6, at+4, "", "end", formatDecade(math.Pow(10, e)))
	}
	groups(s.Rows, func(r Row, x, w float64) {
		if r.Latency.Iterations == 0 {
			return
		}
		p50, p99 := y(place(r.Latency.P50Ns)), y(place(r.Latency.P99Ns))
		p.rect(class(r.Transport), x, p50, w, y(0)-p50)
		p.line("l"+class(r.Transport), x+w/2, p50, x+w/2, p99)
		p.line("l"+class(r.Transport), x+w/4, p99, x+3*w/4, p99)
		p.text(x+w/2, p99-4, "v", "middle", formatUsec(r.Latency.P99Ns)+" µs")
	}, p.lossLabel)
	return p.svg()
}

// sharesPlot stacks each plane's share of our rows.
func sharesPlot(s *Story) template.HTML {
	p := newPlot("share of each plane by loss")
	limit := p.scale(98, "%") // 100 with the headroom
	var ours []Row
	for _, r := range s.Rows {
		if r.Transport == Ours {
			ours = append(ours, r)
		}
	}
	groups(ours, func(r Row, x, w float64) {
		below := 0.0
		for plane, share := range r.Shares {
			from, to := y(100*below/limit), y(100*(below+share)/limit)
			fmt.Fprintf(p, `<rect class="ours" opacity="%.2f" x="%.1f" y="%.1f" width="%.1f" height="%.1f"/>`,
				0.6-0.45*float64(plane)/float64(max(len(r.Shares), 1)), x, to, 2*w, from-to)
			p.text(x+w, (from+to)/2+4, "v", "middle", fmt.Sprintf("plane %d: %.1f %%", plane, 100*share))
			below += share
		}
	}, p.lossLabel)
	return p.svg()
}

const plotStep = 10 * time.Millisecond

// pullPlot draws the rate over time, and when the plane was down.
func pullPlot(pull Pull) template.HTML {
	p := newPlot("goodput over time, " + pull.Transport)
	rates := pull.Series.Rates(plotStep)
	top, total := 0.0, time.Duration(max(len(rates), 1))*plotStep
	for _, r := range rates {
		top = max(top, r/1e9)
	}
	limit := p.scale(top, "Gbit/s")
	x := func(t time.Duration) float64 {
		return plotLeft + (plotRight-plotLeft)*float64(min(t, total))/float64(total)
	}
	p.rect("down", x(pull.Down), plotTop, x(pull.Up)-x(pull.Down), y(0)-plotTop)
	p.text((x(pull.Down)+x(pull.Up))/2, plotTop+12, "", "middle", "plane down")
	fmt.Fprintf(p, `<polyline class="l%s" points="`, class(pull.Transport))
	for i, r := range rates {
		fmt.Fprintf(p, "%.1f,%.1f ", x(time.Duration(i+1)*plotStep), y(r/1e9/limit))
	}
	p.WriteString(`"/>`)
	for t := time.Duration(0); t <= total; t += 500 * time.Millisecond {
		p.text(x(t), plotHeight-8, "", "middle", fmt.Sprintf("%.1f s", t.Seconds()))
	}
	return p.svg()
}
