// SPDX-License-Identifier: Apache-2.0

package lab

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

const bpffsDir = "/sys/fs/bpf"

// pinRoot holds a directory for each lab that has a switch.
const pinRoot = bpffsDir + "/metaroce-lab"

// ensureBPFFS mounts the BPF file system when it is missing. Two processes that
// find it missing together must not both mount it, or the second mount hides the
// first one's pins: the directory below the mount point serves as lock.
func ensureBPFFS() error {
	if isBPFFS() {
		return nil
	}
	dir, err := os.Open(bpffsDir)
	if err != nil {
		return fmt.Errorf("BPF file system: %w", err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("BPF file system: lock %s: %w", bpffsDir, err)
	}
	if isBPFFS() {
		return nil
	}
	if err := unix.Mount("bpf", bpffsDir, "bpf", 0, "mode=0700"); err != nil {
		return fmt.Errorf("BPF file system: nothing mounted at %s and mounting it failed: %w", bpffsDir, err)
	}
	return nil
}

func isBPFFS() bool {
	var stat unix.Statfs_t
	return unix.Statfs(bpffsDir, &stat) == nil && stat.Type == unix.BPF_FS_MAGIC
}
