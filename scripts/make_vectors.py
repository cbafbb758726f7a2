#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write the golden vectors of the wire format: testdata/vectors/*.json.

A second implementation of docs/wire.md, on purpose without a line in common with
package wire or bpf/: it packs every header with struct.pack from the tables of the
document. Encoders and decoders are both held to what it writes.

Usage: scripts/make_vectors.py [DIRECTORY]      (default: testdata/vectors)

A vector is a JSON object:
  name, description
  frame    hex, from the Ethernet destination address, without frame check sequence
  port     the receiver's UDP port
  fields   what the frame says, in the names of bpf/mr_wire.h; 64-bit numbers as hex strings
  refuse   instead of fields: why the frame is not taken (docs/wire.md, section 9)
  trailing bytes at the frame's end that are the link's padding, if there are any
  answer   for some data frames: the ACK that a receiver configured to send tos makes of it,
           for a sender with that qpn
icrc/*.json hold RoCEv2 packets from the IP header on: name, description, packet, icrc.
"""
import ipaddress
import json
import os
import struct
import sys

PORT = 4791
RETX, LAST, IMM, INT, MORE, CRC = 1, 2, 4, 8, 16, 32
WRITE, SEND, READ_REQUEST, ACK, PROBE = 0xC0, 0xC1, 0xC2, 0xD0, 0xD1

HERE = os.path.dirname(os.path.abspath(__file__))
OUT = sys.argv[1] if len(sys.argv) > 1 else os.path.join(HERE, "..", "testdata", "vectors")
made = {}


def save(sub, vector):
    """Keep a vector for writing; a name may be used once."""
    key = os.path.join(sub, vector["name"] + ".json")
    assert key not in made, key
    made[key] = vector


def csum(data):
    """RFC 1071, by 16-bit words and the textbook's end-around carry."""
    if len(data) % 2:
        data += b"\0"
    total = 0
    for (word,) in struct.iter_unpack("!H", data):
        total += word
        if total > 0xFFFF:
            total -= 0xFFFF
    return 0xFFFF - total


def mac(text):
    return bytes.fromhex(text.replace(":", ""))


def outer(f, datagram):
    """Ethernet and IP header in front of a UDP datagram whose checksum field is 0."""
    src, dst = ipaddress.ip_address(f["src"]), ipaddress.ip_address(f["dst"])
    eth = mac(f["dst_mac"]) + mac(f["src_mac"])
    if "vlan" in f:
        eth += struct.pack("!HH", 0x8100, f["vlan"])
    if src.version == 4:
        pseudo = src.packed + dst.packed + struct.pack("!BBH", 0, 17, len(datagram))
        eth += struct.pack("!H", 0x0800)
        head = struct.pack("!BBHHHBBH", 0x45, f["tos"], 20 + len(datagram), f.get("id", 0),
                           f.get("ip_flags", 0) << 13, f["ttl"], 17, 0) + src.packed + dst.packed
        ip = head[:10] + struct.pack("!H", csum(head)) + head[12:]
    else:
        pseudo = src.packed + dst.packed + struct.pack("!IBBBB", len(datagram), 0, 0, 0, 17)
        eth += struct.pack("!H", 0x86DD)
        ip = struct.pack("!IHBB", 6 << 28 | f["tos"] << 20 | f.get("flow_label", 0), len(datagram), 17,
                         f["ttl"]) + src.packed + dst.packed
    if not f.get("no_checksum", False):
        value = csum(pseudo + datagram) or 0xFFFF
        datagram = datagram[:6] + struct.pack("!H", value) + datagram[8:]
    return eth + ip + datagram


def bth(b):
    return struct.pack("!BBHII", b["opcode"], b.get("flags", 0), b["pkey"], b.get("reserved", 0) << 24 | b["qpn"],
                       b["ackreq"] << 31 | b.get("resv7", 0) << 24 | b["psn"])


def body(f):
    """BTH to the end of the payload."""
    out = bth(f["bth"])
    if f["bth"]["opcode"] == ACK:
        a = f["ack"]
        out += struct.pack("!BBBBIII", a["path"], a["gen"], a["flags"], 0x17, a["token"], a["pseq_max"], a["ts"])
        out += b"".join(struct.pack("!Q", int(word, 16)) for word in a["vec"])
        out += struct.pack("!HBB", a["stream"], a["syndrome"], a.get("reserved", 0))
        out += struct.pack("!7I", a["psn_cum"], a["psn_limit"], a["nak_psn"], a["pkts"], a["ce"], a["dups"],
                           a["rate_hint"])
        out += struct.pack("!HHI", a["hint_epoch"], a.get("reserved2", 0), a["credit"])
        return out
    d = f["data"]
    ext = b""
    if "reth" in f:
        ext += struct.pack("!QII", int(f["reth"]["addr"], 16), f["reth"]["rkey"], f["reth"]["len"])
    if "imm" in f:
        ext += struct.pack("!II", f["imm"]["imm"], f["imm"]["ordinal"])
    out += struct.pack("!BBBBIIIIHHII", d["path"], d["gen"], d["flags"], 0x10 | len(ext) // 8, d["token"], d["pseq"],
                       d["psn"], d["ts"], d["stream"], d["backlog"], d["msn"], d["offset"])
    return out + ext + bytes.fromhex(f.get("payload", ""))


def frame(f):
    inner = body(f)
    return outer(f, struct.pack("!HHHH", f["sport"], f["dport"], 8 + len(inner), 0) + inner)


def base(v6=False, **over):
    f = {"src_mac": "02:00:00:00:00:01", "dst_mac": "02:00:00:00:00:02",
         "src": "2001:db8:2::1" if v6 else "198.18.0.1", "dst": "2001:db8:2::2" if v6 else "198.18.0.2",
         "tos": 26 << 2 | 2, "ttl": 64, "sport": 49152, "dport": PORT}
    if v6:
        f["flow_label"] = 0
    else:
        f["id"], f["ip_flags"] = 0, 2
    f.update(over)
    return f


def filler(n, salt=0):
    """n bytes that tell their place: neither constant nor of period 256."""
    return bytes((i * 7 + (i >> 8) * 13 + salt) & 0xFF for i in range(n)).hex()


def write(n, v6=False, flags=LAST, psn=0x00001000, length=None, offset=0, ackreq=False, imm=None, data=None, **over):
    f = base(v6, **over)
    f["bth"] = {"opcode": WRITE, "pkey": 0xFFFF, "qpn": 0x000123, "ackreq": ackreq, "psn": psn & 0xFFFFFF}
    f["data"] = {"path": 3, "gen": 1, "flags": flags | (IMM if imm else 0), "token": 0xA1B2C3D4, "pseq": 0x00000207,
                 "psn": psn, "ts": 0x11223344, "stream": 0, "backlog": 20, "msn": 5, "offset": offset}
    f["data"].update(data or {})
    f["reth"] = {"addr": "%#018x" % (0x00007F0012340000 + offset), "rkey": 0x00000A07,
                 "len": n if length is None else length}
    if imm:
        f["imm"] = {"imm": imm[0], "ordinal": imm[1]}
    f["payload"] = filler(n)
    return f


def probe(v6=False, flags=0, data=None, **over):
    f = base(v6, **over)
    f["bth"] = {"opcode": PROBE, "pkey": 0xFFFF, "qpn": 0x000123, "ackreq": True, "psn": 0x001010}
    f["data"] = {"path": 2, "gen": 0, "flags": flags, "token": 0xA1B2C3D4, "pseq": 0x00000208, "psn": 0x00001010,
                 "ts": 0x55667788, "stream": 0, "backlog": 0, "msn": 6, "offset": 0}
    f["data"].update(data or {})
    f["bth"]["psn"] = f["data"]["psn"] & 0xFFFFFF
    return f


def vec(*bits):
    words = [0, 0, 0, 0]
    for i in bits:
        words[i // 64] |= 1 << (i % 64)
    return ["%#018x" % word for word in words]


ALL = vec(*range(256))


def ack_fields(**over):
    a = {"path": 3, "gen": 1, "flags": 0, "token": 0x5E6F7081, "pseq_max": 0x00000207, "ts": 0x11223344,
         "vec": ALL, "stream": 0, "syndrome": 0, "psn_cum": 0x00001001, "psn_limit": 0x00001001 + 8128, "nak_psn": 0,
         "pkts": 520, "ce": 0, "dups": 0, "rate_hint": 0, "hint_epoch": 0, "credit": 0}
    a.update(over)
    return a


def ack(v6=False, over=None, **fields):
    f = base(v6, **(over or {}))
    f["ack"] = ack_fields(**fields)
    f["bth"] = {"opcode": ACK, "pkey": 0xFFFF, "qpn": 0x000456, "ackreq": False,
                "psn": f["ack"]["psn_cum"] & 0xFFFFFF}
    return f


def good(name, description, f, answer=None, padding=b""):
    raw = frame(f)
    # What would make a wrong vector is checked here, once more by another route.
    assert len(raw) == (14 + 4 * ("vlan" in f) + (40 if ":" in f["src"] else 20) + 8 + 12
                        + (88 if "ack" in f else 32 + 16 * ("reth" in f) + 8 * ("imm" in f))
                        + len(f.get("payload", "")) // 2), name
    v = {"name": name, "description": description, "port": f["dport"], "frame": (raw + padding).hex(), "fields": f}
    if padding:
        v["trailing"] = len(padding)
    if answer is not None:
        back = dict(f)
        for key in ("data", "reth", "imm", "payload"):
            back.pop(key, None)
        back["src"], back["dst"], back["src_mac"], back["dst_mac"] = f["dst"], f["src"], f["dst_mac"], f["src_mac"]
        back["tos"], back["ttl"], back["ack"] = 26 << 2 | 2, 64, answer
        back["bth"] = {"opcode": ACK, "pkey": 0xFFFF, "qpn": 0x000456, "ackreq": False,
                       "psn": answer["psn_cum"] & 0xFFFFFF}
        v["answer"] = {"qpn": 0x000456, "tos": 26 << 2 | 2, "ack": answer, "frame": frame(back).hex()}
    save("", v)


def bad(name, reason, description, raw, port=PORT):
    save("", {"name": name, "description": description, "port": port, "frame": raw.hex(), "refuse": reason})


def sum_to_zero(f, part, field):
    """Choose a 32-bit field so that the UDP sum comes out as 0 and 0xffff must be sent."""
    f[part][field] = 0
    raw = frame(f)
    at = 14 + 4 * ("vlan" in f) + (40 if ":" in f["src"] else 20) + 6
    f[part][field] = struct.unpack("!H", raw[at:at + 2])[0]
    raw = frame(f)
    assert raw[at:at + 2] == b"\xff\xff"
    return f


def writes():
    for v6, fam in ((False, "v4"), (True, "v6")):
        good(f"write_only_{fam}", "a message of one packet, 1024 bytes", write(1024, v6))
        good(f"write_first_{fam}", "first of three: 1024 of 2500 bytes, more to come",
             write(1024, v6, flags=MORE, length=2500))
        good(f"write_middle_{fam}", "second of three: the RETH holds this packet's address",
             write(1024, v6, flags=MORE, length=2500, offset=1024, psn=0x1001))
        good(f"write_last_{fam}", "third of three: 452 bytes, asks for an ACK",
             write(452, v6, length=2500, offset=2048, psn=0x1002, ackreq=True))
        good(f"write_last_imm_{fam}", "last of three with an immediate; first and middle look as without",
             write(452, v6, length=2500, offset=2048, psn=0x1002, ackreq=True, imm=(0xCAFEF00D, 9)))
        good(f"write_only_imm_{fam}", "one packet with an immediate", write(64, v6, imm=(0x01020304, 0)))
        good(f"write_zero_{fam}", "no payload; turned round it grows to the ACK's size", write(0, v6),
             answer=ack_fields())
        good(f"write_zero_imm_{fam}", "no payload, an immediate, the last ordinal before the wrap",
             write(0, v6, imm=(0xFFFFFFFF, 0xFFFFFFFF)), answer=ack_fields(credit=1))
        good(f"write_vlan_{fam}", "802.1Q tag: priority 3, VLAN 100", write(256, v6, vlan=3 << 13 | 100),
             answer=ack_fields(path=3))
        good(f"write_max_{fam}", "the largest payload, 3072 bytes", write(3072, v6))
        good(f"write_max_vlan_imm_{fam}", "the longest frame: tag, immediate, 3072 bytes",
             write(3072, v6, vlan=0xEFFF, imm=(1, 2)))
        good(f"write_1byte_{fam}", "one byte: the sum pads it", write(1, v6))
        good(f"write_odd_{fam}", "1023 bytes: odd", write(1023, v6))
        good(f"write_ce_{fam}", "marked by the network; the ACK goes out ECT(0) with a fresh TTL",
             write(100, v6, tos=26 << 2 | 3, ttl=3), answer=ack_fields(ce=1))
        good(f"write_not_ect_{fam}", "DSCP and ECN bleached on the way; the ACK has its own again",
             write(100, v6, tos=0), answer=ack_fields())
        good(f"write_padded_{fam}", "six bytes of padding behind the IP packet, which do not count",
             write(10, v6), answer=ack_fields(), padding=b"\xff" * 6)
        good(f"write_nocsum_{fam}", "checksum: off on both ends: the field is 0", write(512, v6, no_checksum=True),
             answer=ack_fields())
        good(f"write_sum_zero_{fam}", "the sum comes out as 0 and is sent as 0xffff",
             sum_to_zero(write(128, v6), "data", "ts"))
    good("write_retx", "a retransmission: fresh pseq, the old psn, asks for an ACK",
         write(1024, flags=RETX, length=4096, offset=1024, psn=0x0FF1, ackreq=True, data={"pseq": 0x300}))
    good("write_retx_last_imm_more", "every flag of version 1 at once",
         write(32, flags=RETX | LAST | MORE, imm=(7, 8), ackreq=True))
    good("write_psn_max", "psn 0xffffffff", write(16, psn=0xFFFFFFFF))
    good("write_psn_wrapped", "psn 0 after 0xffffffff", write(16, psn=0))
    good("write_psn24", "psn 0x01000000: the BTH's 24 bits are 0", write(16, psn=0x01000000))
    good("write_pseq_max", "pseq 0xffffffff", write(16, data={"pseq": 0xFFFFFFFF}))
    good("write_pseq_wrapped", "pseq 0 after 0xffffffff", write(16, data={"pseq": 0}))
    good("write_msn_max", "msn 0xffffffff, backlog, stream and path at their ends",
         write(16, data={"msn": 0xFFFFFFFF, "backlog": 0xFFFF, "stream": 0xFFFF, "path": 31, "gen": 255}))
    f = write(1023, flags=LAST, length=0xFFFFFFFF, offset=0xFFFFFC00)
    f["reth"]["addr"], f["reth"]["rkey"] = "0xfffffffffffffc00", 0xFFFFFFFF
    good("write_end_of_4gib", "the end of the longest message at the end of the address space", f)
    good("write_ip_fields_v4", "identification, no don't-fragment, another TTL and port pair",
         write(8, id=0xBEEF, ip_flags=0, ttl=1, sport=65535), answer=ack_fields())
    good("write_ip_fields_v6", "flow label, hop limit 255", write(8, True, flow_label=0xFACED, ttl=255),
         answer=ack_fields())
    good("write_port", "another UDP port than 4791", write(8, dport=4971))
    f = write(8)
    f["bth"].update(flags=0xFF, reserved=0xFF, resv7=0x7F, pkey=0x8001)
    good("write_bth_reserved", "bits of the BTH that a receiver does not look at", f)


def probes():
    for v6, fam in ((False, "v4"), (True, "v6")):
        good(f"probe_{fam}", "a probe: the data header and nothing else", probe(v6),
             answer=ack_fields(flags=1, path=2, gen=0, ts=0x55667788, pseq_max=0x208))
        good(f"probe_vlan_{fam}", "a probe on a tagged link", probe(v6, vlan=1))
        good(f"probe_nocsum_{fam}", "a probe with checksum: off", probe(v6, no_checksum=True))
        good(f"probe_full_{fam}", "a full-size probe: zeros up to the length of the longest data packet",
             probe(v6, payload=bytes(3072 + 24).hex()),
             answer=ack_fields(flags=1, path=2, gen=0, ts=0x55667788, pseq_max=0x208))
        good(f"probe_padded_{fam}", "a probe with some padding", probe(v6, payload=bytes(8).hex()))
    good("probe_more", "a probe of a sender that waits for windows", probe(flags=MORE, data={"backlog": 63}))
    good("probe_wrap", "pseq and next psn 0", probe(data={"pseq": 0, "psn": 0}))
    good("probe_sum_zero", "the sum comes out as 0 and is sent as 0xffff", sum_to_zero(probe(), "data", "ts"))


def acks():
    for v6, fam in ((False, "v4"), (True, "v6")):
        good(f"ack_{fam}", "everything arrived", ack(v6))
        good(f"ack_vlan_{fam}", "on a tagged link", ack(v6, over={"vlan": 5 << 13 | 4094}))
        good(f"ack_nocsum_{fam}", "with checksum: off", ack(v6, over={"no_checksum": True}))
        good(f"ack_sum_zero_{fam}", "the sum comes out as 0 and is sent as 0xffff",
             sum_to_zero(ack(v6), "ack", "ts"))
    good("ack_first", "answers the first packet of a path: one bit", ack(vec=vec(0), pseq_max=0x1000, pkts=1))
    good("ack_none", "nothing arrived yet: no bit", ack(vec=vec(), pkts=0, psn_cum=0x1000))
    good("ack_gap", "pseq_max - 1 and - 64 are missing",
         ack(vec=vec(*(i for i in range(256) if i not in (1, 64)))))
    for i in (0, 1, 63, 64, 127, 128, 191, 192, 255):
        good(f"ack_bit_{i}", f"only bit {i}: word {i // 64}, bit {i % 64}", ack(vec=vec(i)))
    good("ack_pseq_wrap", "pseq_max 3, and the vector reaches back over 0 to 0xffffffff and below",
         ack(pseq_max=3, vec=vec(0, 1, 2, 3, 4, 6, 19)))
    good("ack_psn_wrap", "psn_cum 0xfffffff0, psn_limit beyond the wrap",
         ack(psn_cum=0xFFFFFFF0, psn_limit=(0xFFFFFFF0 + 8128) & 0xFFFFFFFF))
    good("ack_psn24", "psn_cum 0x02000001: the BTH says 1", ack(psn_cum=0x02000001, psn_limit=0x02000001 + 8128))
    for code, name in ((0x61, "invalid_request"), (0x62, "remote_access"), (0x63, "remote_operation")):
        good(f"nak_{name}", f"psn 0x1005 refused with syndrome {code:#x}, 0x1001 still missing",
             ack(syndrome=code, nak_psn=0x1005))
    good("nak_unknown", "a syndrome of no name in version 1", ack(syndrome=0x7F, nak_psn=0x1005))
    good("nak_wrap", "the refused psn is beyond the wrap",
         ack(syndrome=0x62, nak_psn=1, psn_cum=0xFFFFFFFE, psn_limit=8000))
    good("ack_probe", "answers a probe", ack(flags=1))
    good("ack_counts", "packets, marks and duplicates of the path", ack(pkts=0xFFFFFFFF, ce=0x12345678, dups=3))
    good("ack_credit", "four receives posted: ordinals 0 to 3", ack(credit=4))
    good("ack_hint", "25 Gbit/s for this sender, epoch 7", ack(rate_hint=25000, hint_epoch=7))
    good("ack_reserved", "bits that a sender does not look at", ack(reserved=0xFF, reserved2=0xFFFF))


def patch(raw, at, value):
    return raw[:at] + value + raw[at + len(value):]


def resum(f, change):
    """The frame of f with its datagram changed and a right checksum over the result."""
    inner = change(body(f))
    return outer(f, struct.pack("!HHHH", f["sport"], f["dport"], 8 + len(inner), 0) + inner)


def refusals():
    for v6, fam in ((False, "v4"), (True, "v6")):
        l4 = 14 + (40 if v6 else 20)
        raw = frame(write(64, v6))
        n = 8 + 12 + 48 + 64
        for bit_at, what in ((l4 + 8 + 20, "pseq"), (l4 + 8 + 12 + 32, "address"), (len(raw) - 1, "payload")):
            flipped = patch(raw, bit_at, bytes([raw[bit_at] ^ 1]))
            bad(f"bad_sum_{what}_{fam}", "checksum", f"one bit of the {what} turned", flipped)
        bad(f"bad_sum_field_{fam}", "checksum", "one bit of the checksum turned",
            patch(raw, l4 + 6, bytes([raw[l4 + 6] ^ 0x80])))
        bad(f"bad_udp_longer_{fam}", "length", "UDP length one more than the packet's",
            patch(raw, l4 + 4, struct.pack("!H", n + 1)))
        bad(f"bad_udp_shorter_{fam}", "length", "UDP length one less than the packet's",
            patch(raw, l4 + 4, struct.pack("!H", n - 1)))
        bad(f"bad_udp_zero_{fam}", "length", "UDP length 0", patch(raw, l4 + 4, b"\0\0"))
        bad(f"bad_cut_{fam}", "length", "the last byte is missing", raw[:-1])
    raw = frame(write(64))
    bad("bad_ip_length", "length", "IPv4 length one less than the frame's", patch(raw, 16, struct.pack("!H", 151)))
    bad("bad_ip_length_below_header", "length", "IPv4 length 19", patch(raw, 16, struct.pack("!H", 19)))
    bad("bad_frame_ends_in_bth", "length", "the frame ends in the BTH", raw[:42 + 11])
    bad("bad_runt", "truncated", "a UDP datagram without a byte", outer(base(), struct.pack("!4H", 49152, PORT, 8, 0)))
    bad("bad_udp_4", "truncated", "UDP length 4, as IP says",
        patch(outer(base(no_checksum=True), struct.pack("!4H", 49152, PORT, 4, 0)), 16, struct.pack("!H", 24)))
    for f, least, name in ((write(0), 48, "write"), (write(0, imm=(1, 2)), 56, "write_imm"), (probe(), 32, "probe"),
                           (ack(), 88, "ack")):
        bad(f"bad_truncated_{name}_bth", "truncated", "lengths agree, the BTH lacks a byte", resum(f, lambda b: b[:11]))
        bad(f"bad_truncated_{name}", "truncated", "lengths agree, the headers lack a byte",
            resum(f, lambda b, n=least: b[:12 + n - 1]))
    bad("bad_opcode_before_truncated", "opcode", "unknown opcode and nothing but a BTH",
        resum(write(0), lambda b: b"\xff" + b[1:12]))
    for op, name in ((0xC1, "send"), (0xC2, "read_request"), (0xC3, "read_response"), (0xC4, "atomic_request"),
                     (0xC5, "atomic_response"), (0xC6, "c6"), (0xCF, "cf"), (0xD2, "d2"), (0xFF, "ff")):
        bad(f"bad_opcode_{name}", "opcode", f"opcode {op:#x}: reserved or unknown in version 1",
            resum(write(64), lambda b, op=op: bytes([op]) + b[1:]))
    for version in (0, 2, 15):
        bad(f"bad_version_{version}", "version", f"a Write of version {version}",
            resum(write(64), lambda b, v=version: patch(b, 15, bytes([v << 4 | 2]))))
    bad("bad_version_ack", "version", "an ACK of version 2", resum(ack(), lambda b: patch(b, 15, b"\x27")))
    bad("bad_version_before_header", "version", "version and length field wrong: the version is looked at first",
        resum(write(64), lambda b: patch(b, 15, b"\x23")))
    for ext in (0, 1, 3, 4):
        bad(f"bad_write_ext_{ext}", "header", f"a Write without immediate and length field {ext}",
            resum(write(64), lambda b, e=ext: patch(b, 15, bytes([0x10 | e]))))
    bad("bad_imm_ext", "header", "an immediate that the length field leaves out",
        resum(write(64, imm=(1, 2)), lambda b: patch(b, 15, b"\x12")))
    bad("bad_imm_not_last", "header", "an immediate on a packet that is not the last",
        resum(write(64, imm=(1, 2)), lambda b: patch(b, 14, bytes([IMM]))))
    for bit in (INT, CRC, 0x40, 0x80):
        bad(f"bad_write_flag_{bit:02x}", "header", f"a Write with flag {bit:#x}: reserved or unknown",
            resum(write(64), lambda b, x=bit: patch(b, 14, bytes([LAST | x]))))
    for bit in (RETX, LAST, IMM, INT, CRC, 0x40, 0x80):
        bad(f"bad_probe_flag_{bit:02x}", "header", f"a probe with flag {bit:#x}",
            resum(probe(), lambda b, x=bit: patch(b, 14, bytes([x]))))
    for bit in (0x02, 0x04, 0x08, 0x10, 0x20, 0x40, 0x80):
        bad(f"bad_ack_flag_{bit:02x}", "header", f"an ACK with flag {bit:#x}: reserved or unknown",
            resum(ack(), lambda b, x=bit: patch(b, 14, bytes([x]))))
    bad("bad_probe_padding", "payload", "a probe longer than the longest data packet",
        frame(probe(payload=bytes(3072 + 25).hex())))
    bad("bad_probe_ext", "header", "a probe with a header too many",
        resum(probe(), lambda b: patch(b, 15, b"\x11") + bytes(8)))
    bad("bad_ack_payload", "header", "an ACK with 4 bytes behind it", resum(ack(), lambda b: b + bytes(4)))
    bad("bad_ack_ext", "header", "an ACK whose length field says 6", resum(ack(), lambda b: patch(b, 15, b"\x16")))
    bad("bad_length_before_sum", "length", "a length and the sum wrong: lengths are looked at first",
        patch(frame(write(64)), 38, b"\x00\x10"))
    bad("bad_payload", "payload", "3073 bytes of payload", frame(write(3073)))


def foreign():
    raw = frame(write(64))
    raw6 = frame(write(64, True))
    bad("pass_arp", "not ours", "an ARP request", bytes.fromhex(
        "ffffffffffff020000000001080600010800060400010200000000 01c61200010000 00000000c6120002".replace(" ", "")))
    bad("pass_port", "not ours", "UDP to another port", patch(raw, 36, struct.pack("!H", 4790)))
    bad("pass_tcp", "not ours", "protocol TCP", patch(raw, 23, b"\x06"))
    bad("pass_ipv4_options", "not ours", "IPv4 header of 24 bytes", patch(raw, 14, b"\x46"))
    bad("pass_ipv4_first_fragment", "not ours", "more fragments follow", patch(raw, 20, b"\x20\x00"))
    bad("pass_ipv4_last_fragment", "not ours", "fragment offset 8", patch(raw, 20, b"\x00\x01"))
    bad("pass_ipv4_version", "not ours", "IPv4 by Ethernet type, version 6 in the header", patch(raw, 14, b"\x65"))
    bad("pass_ipv6_version", "not ours", "IPv6 by Ethernet type, version 4 in the header", patch(raw6, 14, b"\x46"))
    for number, what in ((0, "hop-by-hop options"), (43, "routing header"), (44, "fragment"), (60, "destination options")):
        bad(f"pass_ipv6_ext_{number}", "not ours", f"IPv6 with {what}", patch(raw6, 20, bytes([number])))
    tagged = frame(write(64, vlan=100))
    bad("pass_qinq", "not ours", "two tags", tagged[:12] + struct.pack("!HH", 0x8100, 7) + tagged[12:])
    bad("pass_service_tag", "not ours", "an 802.1ad service tag", patch(tagged, 12, b"\x88\xa8"))
    for op in (0x04, 0x0A, 0x11, 0x81, 0xBF):
        bad(f"pass_rocev2_{op:02x}", "not ours", f"a RoCEv2 packet, opcode {op:#x}",
            resum(write(64), lambda b, op=op: bytes([op]) + b[1:]))
    bad("pass_short_rocev2", "not ours", "RoCEv2 with nothing but a BTH and its ICRC",
        resum(write(64), lambda b: b"\x0c" + b[1:16]))


def crc32(data):
    """CRC-32 bit by bit."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0xEDB88320 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def icrc(packet):
    """InfiniBand 1.7, section 7.8 and annex A17."""
    p = bytearray(packet)
    if p[0] >> 4 == 4:
        l4, ones = 20, [1, 8, 10, 11]
    else:
        l4, ones = 40, [1, 2, 3, 7]
        p[0] |= 0x0F
    for i in ones + [l4 + 6, l4 + 7, l4 + 12]:
        p[i] = 0xFF
    return crc32(b"\xff" * 8 + bytes(p))


def roce(v6, payload, opcode=0x04, **over):
    """A RoCEv2 packet without its ICRC, its lengths counting it."""
    pad = -len(payload) % 4
    inner = struct.pack("!BBHII", opcode, pad << 4, 0xFFFF, over.get("becn", 0) << 24 | 0x11, 0x80000000 | 0x1234)
    inner += payload + bytes(pad)
    length = 8 + len(inner) + 4
    src, dst = (("2001:db8:2::1", "2001:db8:2::2") if v6 else ("198.18.0.1", "198.18.0.2"))
    src, dst = ipaddress.ip_address(src), ipaddress.ip_address(dst)
    tos, ttl = over.get("tos", 0x68), over.get("ttl", 64)
    if v6:
        ip = struct.pack("!IHBB", 6 << 28 | tos << 20 | over.get("label", 0), length, 17, ttl) + src.packed + dst.packed
    else:
        head = struct.pack("!BBHHHBBH", 0x45, tos, 20 + length, 7, 0x4000, ttl, 17, 0) + src.packed + dst.packed
        ip = head[:10] + struct.pack("!H", csum(head)) + head[12:]
    return ip + struct.pack("!HHHH", 49152, PORT, length, over.get("sum", 0)) + inner


def icrcs():
    def one(name, description, packet):
        save("icrc", {"name": name, "description": description, "packet": packet.hex(),
                      "icrc": "%#010x" % icrc(packet)})

    for v6, fam in ((False, "v4"), (True, "v6")):
        values = set()
        for pad in range(4):
            one(f"pad{pad}_{fam}", f"SEND only, {pad} bytes of pad", roce(v6, bytes(range(20 - pad))))
        for name, over in (("plain", {}), ("tos", {"tos": 3}), ("ttl", {"ttl": 1}), ("sum", {"sum": 0x1234}),
                           ("becn", {"becn": 0x40})) + ((("label", {"label": 0x1FACE}),) if v6 else ()):
            packet = roce(v6, b"masked fields!", **over)
            one(f"masked_{name}_{fam}", "the same ICRC whatever the fabric changes", packet)
            values.add(icrc(packet))
        assert len(values) == 1
        one(f"ack_{fam}", "an RC ACK", roce(v6, bytes.fromhex("1f000001"), opcode=0x11))


def main():
    for make in (writes, probes, acks, refusals, foreign, icrcs):
        make()
    for path, vector in made.items():
        full = os.path.join(OUT, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="ascii") as f:
            json.dump(vector, f, indent=1)
            f.write("\n")
    print(f"{len(made)} vectors in {os.path.normpath(OUT)}" if len(sys.argv) > 1 else f"{len(made)} vectors")


if __name__ == "__main__":
    main()
