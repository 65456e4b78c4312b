//! Which attributes a copy has.
//!
//! A copy keeps all attributes but those that the caller leaves out. For these it is like a file
//! that the caller makes: its owner is the caller, the umask limits its permissions, and its times
//! are the moment of the copy. Set-id bits lend the rights of the owner, so they go when the owner
//! goes.

use offshoot_vfs::{Attr, FileId, FileType, Timestamp};
use rustix::process;

/// What a copy may keep of a file, beside its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PreservedAttribute {
    /// Permissions.
    Mode,
    /// User and group.
    Ownership,
    /// Access and modification time.
    Timestamps,
    /// Hard links.
    Links,
    /// Extended attributes, with ACLs.
    Xattr,
}

impl PreservedAttribute {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::Mode, Self::Ownership, Self::Timestamps, Self::Links, Self::Xattr];
}

/// Which attributes are kept, and the values that the others get.
pub struct Preserve {
    left_out: Vec<PreservedAttribute>,
    umask: u32,
    owner: (u32, u32),
    at: Timestamp,
    latest: Option<Timestamp>,
}

impl Preserve {
    /// All but `left_out`, in a copy that is made at the moment `at`. Permissions that are left out
    /// are those that `umask` leaves.
    #[must_use]
    pub fn all_but(left_out: &[PreservedAttribute], umask: u32, at: Timestamp) -> Self {
        let owner = (process::geteuid().as_raw(), process::getegid().as_raw());
        Self { left_out: left_out.to_vec(), umask, owner, at, latest: None }
    }

    /// The same with no time later than `latest`. The time of the last access becomes that of the
    /// last change, because reading a file may change it.
    #[must_use]
    pub fn with_latest(self, latest: Option<Timestamp>) -> Self {
        Self { latest, ..self }
    }

    /// Whether an attribute is kept.
    #[must_use]
    pub fn keeps(&self, attribute: PreservedAttribute) -> bool {
        !self.left_out.contains(&attribute)
    }

    /// The attributes of the copy of a file with the attributes `attr`.
    #[must_use]
    pub fn of(&self, attr: &Attr) -> Attr {
        let mut copy = *attr;
        if !self.keeps(PreservedAttribute::Mode) {
            copy.permissions &= 0o777 & !self.umask;
        }
        if !self.keeps(PreservedAttribute::Ownership) {
            (copy.uid, copy.gid) = self.owner;
            copy.permissions &= !0o6000;
        }
        if !self.keeps(PreservedAttribute::Timestamps) {
            (copy.atime, copy.mtime) = (self.at, self.at);
        } else if let Some(latest) = self.latest {
            copy.mtime = copy.mtime.min(latest);
            copy.atime = copy.mtime;
        }
        if !self.keeps(PreservedAttribute::Links) {
            copy.nlink = 1;
        }
        copy
    }

    /// The attributes of a file that is made of a stream.
    #[must_use]
    pub fn of_stream(&self) -> Attr {
        Attr {
            // No file of the host or of a volume has this number.
            file: FileId { dev: 0, ino: 0 },
            file_type: FileType::Regular,
            permissions: 0o666 & !self.umask,
            nlink: 1,
            uid: self.owner.0,
            gid: self.owner.1,
            rdev: (0, 0),
            size: 0,
            allocated_bytes: 0,
            atime: self.at,
            mtime: self.at,
            ctime: self.at,
            btime: self.at,
            generation: 0,
        }
    }
}
