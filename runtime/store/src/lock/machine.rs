//! Identifies this machine, and the file systems that only it can see.

use std::path::Path;
use std::sync::OnceLock;

/// The boot id of the running kernel: the same for all processes and containers of a machine until it reboots, and
/// different on every other machine, even with the same host name. Empty if it cannot be read.
pub(crate) fn boot_id() -> &'static str {
    static BOOT: OnceLock<String> = OnceLock::new();
    BOOT.get_or_init(|| {
        std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map(|id| id.trim().to_string())
            .unwrap_or_default()
    })
}

/// Magic numbers (`statfs(2)`) of file systems on a disk or in the memory of one machine. Whatever is not among them
/// (NFS, SMB, Lustre, Ceph, FUSE, 9P, ...) may be shared with others.
const LOCAL: [i64; 11] = [
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // Btrfs
    0x0102_1994, // tmpfs
    0x8584_58f6, // ramfs
    0x2fc1_2fc1, // ZFS
    0xf2f5_2010, // F2FS
    0x3153_464a, // JFS
    0x5265_4973, // ReiserFS
    0xca45_1a4e, // bcachefs
    0x4d44,      // FAT
];

/// Whether the files of a folder can be seen by this machine only.
pub fn is_of_one_machine(folder: &Path) -> bool {
    // overlayfs: the kernel accepts only local file systems as upper layer.
    const OVERLAY: i64 = 0x794c_7630;
    // The width of the field differs between platforms; the magic number has 32 bits.
    let kind = rustix::fs::statfs(folder).map(|about| i64::from(about.f_type as u32));
    kind.is_ok_and(|kind| kind == OVERLAY || LOCAL.contains(&kind))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_temporary_folder_is_of_this_machine_and_proc_is_not_taken_for_it() {
        assert_eq!(boot_id().len(), 36);
        assert!(!is_of_one_machine(Path::new("/proc")));
        assert!(!is_of_one_machine(Path::new("/none/at/all")));
    }
}
