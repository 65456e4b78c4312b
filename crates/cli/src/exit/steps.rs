//! What the user can do next about a damaged volume.
//!
//! The engines say what is wrong and where, and know no verbs. The verb that goes on depends on the
//! damaged structure, which the code of the error names. The same step is shown once in a run,
//! however many files are damaged.

use offshoot_vfs::{Code, Errno, Error};

const SUPERBLOCKS: &str =
    "`offshoot dump super` shows all superblocks; another one is used by itself where it is sound";
const CHECK: &str = "`offshoot check` lists all that is wrong";
const RECOVER: &str = "`offshoot recover` gets out of a btrfs volume what can still be read";
const REPAIR_XFS: &str = "xfs_repair repairs an XFS volume";
const SCRUB: &str = "`offshoot scrub` repairs what another copy has";
const SCAN: &str = "`offshoot repair --scan` makes superblocks and the chunk tree of a btrfs \
                    volume from what a search of all devices finds";
const LOST: &str = "if it was a btrfs volume, all superblocks are lost: `offshoot recover` gets \
                    the files out, and `offshoot repair --scan` makes superblocks, by a search of \
                    all devices";
const SALVAGE: &str = "`offshoot extract --salvage` writes the rest of a file, and \
                       --ignore-checksums reads it as it is";

/// The steps after errors about single files that were extracted or copied.
pub(super) const AFTER_FILES: &[&str] = &[SALVAGE, RECOVER];

/// The steps after `error`.
pub(super) fn after(error: &Error) -> &'static [&'static str] {
    // What the device of a volume cannot read. Other failures of the host have other numbers.
    if let Error::Io { source, .. } = error {
        let is_unreadable = source.raw_os_error() == Some(Errno::IO.raw_os_error());
        return if is_unreadable { &[RECOVER] } else { &[] };
    }
    if error.code() == Code::NoVolume {
        return &[LOST];
    }
    if !matches!(error, Error::Corrupt(_)) {
        return &[];
    }
    match error.code() {
        Code::Superblock => &[SUPERBLOCKS, SCAN, RECOVER],
        Code::Chunk => &[CHECK, SCAN, RECOVER],
        Code::Data | Code::CompressedData => &[SCRUB, SALVAGE],
        Code::AllocationGroup | Code::GroupRecord => &[CHECK, REPAIR_XFS],
        // What to do about a log is said with the failure.
        Code::Log | Code::LogNotReplayed | Code::DelayedItems => &[],
        _ => &[CHECK, RECOVER],
    }
}

#[cfg(test)]
mod tests {
    use offshoot_vfs::Structure;

    use super::*;

    #[test]
    fn each_kind_of_damage_has_a_step_and_other_errors_have_none() {
        let steps = |structure| after(&Error::corrupt(structure, "it is damaged"));
        assert_eq!(steps(Structure::Superblock), [SUPERBLOCKS, SCAN, RECOVER]);
        assert_eq!(steps(Structure::Leaf), [CHECK, RECOVER]);
        assert_eq!(steps(Structure::Data), [SCRUB, SALVAGE]);
        assert_eq!(after(&Error::posix(Errno::NOENT, "/etc/fstab")), [""; 0]);
        let none = Error::posix(Errno::INVAL, "no superblock").with_code(Code::NoVolume);
        assert_eq!(after(&none), [LOST]);
        assert_eq!(after(&Error::io("reading", Errno::IO)), [RECOVER]);
        assert_eq!(after(&Error::io("reading", Errno::NXIO)), [""; 0]);
    }
}
