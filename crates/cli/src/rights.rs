//! What a user may do on a mounted volume: the rules of the kernel, for verbs that the serving
//! process runs for a client.
//!
//! Before `mkdir`, the kernel checks the permissions of the directory. But `subvolume create` on a
//! mount is only an ioctl to the kernel, and it checks no permissions for that. So the verbs call
//! this module, which refuses what the kernel's btrfs would refuse. Root may do everything.
//!
//! | verb | what the caller needs |
//! |---|---|
//! | `create` | to write and search the directory |
//! | `snapshot` | the same, to read the source, and to own it |
//! | `delete` | what `rmdir` needs, and to write and search the subvolume: the rule of `user_subvol_rm_allowed` |
//! | `set`, `property set ro` | to own the subvolume |
//! | `property set compression` | to write the file or directory |
//!
//! In addition, every verb needs the right to search each directory above.

use offshoot_fuse::ShownOwner;
use offshoot_vfs::acl::{ACCESS, Accessor, Acl};
use offshoot_vfs::{Attr, EntryPlace, Errno, Error, FileId, FileSystem, Result, Structure};

/// The rights to read a file, to write it, and to search a directory, as the bits of one class of
/// permissions.
const READ: u32 = 4;
const WRITE: u32 = 2;
const SEARCH: u32 = 1;

/// The bit of a directory in which users may remove only their own files.
const STICKY: u32 = 0o1000;

/// The deepest nesting of directories above a file.
const LEVELS_MAX: u32 = 1 << 16;

/// A user of a mount who is not root.
pub(crate) struct Rights {
    /// The id of the user.
    pub(crate) uid: u32,
    /// All groups of that user.
    pub(crate) groups: Vec<u32>,
    /// The owner that the mount shows for all files, if it is set.
    pub(crate) shown: ShownOwner,
}

impl Rights {
    /// Checks that the user may add a name to `dir`.
    pub(crate) fn require_new_name(&self, fs: &dyn FileSystem, dir: FileId) -> Result<()> {
        self.require_way(fs, dir)?;
        self.require(fs, dir, WRITE | SEARCH)
    }

    /// Checks that the user may make a snapshot of the subvolume with this root.
    pub(crate) fn require_source(&self, fs: &dyn FileSystem, root: FileId) -> Result<()> {
        self.require_way_above(fs, root)?;
        self.require(fs, root, READ)?;
        self.require_owner(fs, root)
    }

    /// Checks that the user may make the subvolume with this root read-only, or writable again.
    pub(crate) fn require_settings(&self, fs: &dyn FileSystem, root: FileId) -> Result<()> {
        self.require_way_above(fs, root)?;
        self.require_owner(fs, root)
    }

    /// Checks that the user may change metadata of `file` that follows the right to write its
    /// contents. `file` was found in `dir`.
    pub(crate) fn require_change(
        &self,
        fs: &dyn FileSystem,
        dir: Option<FileId>,
        file: FileId,
    ) -> Result<()> {
        if let Some(dir) = dir {
            self.require_way(fs, dir)?;
        }
        self.require(fs, file, WRITE)
    }

    /// Checks that the user may delete the subvolume at `place`.
    pub(crate) fn require_removal(&self, fs: &dyn FileSystem, place: EntryPlace<'_>) -> Result<()> {
        self.require_way(fs, place.dir)?;
        let root = fs.lookup(place.dir, place.name)?;
        self.require(fs, root, WRITE | SEARCH)?;
        self.require(fs, place.dir, WRITE)?;
        let dir = self.shown(fs, place.dir)?;
        let is_kept = dir.permissions & STICKY != 0
            && dir.uid != self.uid
            && self.shown(fs, root)?.uid != self.uid;
        if is_kept {
            return Err(Error::posix(Errno::PERM, "what others have in a sticky directory"));
        }
        Ok(())
    }

    /// Checks that the user may search `dir` and every directory above it.
    fn require_way(&self, fs: &dyn FileSystem, dir: FileId) -> Result<()> {
        self.require(fs, dir, SEARCH)?;
        self.require_way_above(fs, dir)
    }

    fn require_way_above(&self, fs: &dyn FileSystem, directory: FileId) -> Result<()> {
        let mut at = directory;
        for _ in 0..LEVELS_MAX {
            if at == fs.root() {
                return Ok(());
            }
            let Some(parent) = fs.parent(at)? else { return Ok(()) };
            at = parent.dir;
            self.require(fs, at, SEARCH)?;
        }
        Err(Error::corrupt(Structure::Directory, "the way to it has no end"))
    }

    fn require_owner(&self, fs: &dyn FileSystem, file: FileId) -> Result<()> {
        if self.shown(fs, file)?.uid == self.uid {
            return Ok(());
        }
        Err(Error::posix(Errno::PERM, "a subvolume of another user"))
    }

    fn require(&self, fs: &dyn FileSystem, file: FileId, wanted: u32) -> Result<()> {
        if self.may(fs, file, wanted)? {
            return Ok(());
        }
        Err(Error::posix(Errno::ACCESS, "what the caller has no permission for"))
    }

    fn may(&self, fs: &dyn FileSystem, file: FileId, wanted: u32) -> Result<bool> {
        let attr = self.shown(fs, file)?;
        let has = |shift: u32| attr.permissions >> shift & wanted == wanted;
        if attr.uid == self.uid {
            return Ok(has(6));
        }
        // If the group bits, which are the mask of a list, are empty, the kernel ignores the list.
        let value = match attr.permissions & 0o070 {
            0 => None,
            _ => match fs.xattr(file, ACCESS) {
                Ok(value) => Some(value),
                Err(Error::Posix { errno: Errno::NODATA, .. }) => None,
                Err(error) => return Err(error),
            },
        };
        let is_member = |gid: u32| self.groups.contains(&gid);
        if let Some(list) = value.map(|value| Acl::parse(&value)).transpose()?.flatten() {
            let accessor = Accessor { uid: self.uid, is_member: &is_member };
            return Ok(list.allows(&accessor, attr.uid, attr.gid, wanted));
        }
        Ok(has(if is_member(attr.gid) { 3 } else { 0 }))
    }

    /// The attributes of a file as the mount shows them.
    fn shown(&self, fs: &dyn FileSystem, file: FileId) -> Result<Attr> {
        let mut attr = fs.attr(file)?;
        attr.uid = self.shown.uid.unwrap_or(attr.uid);
        attr.gid = self.shown.gid.unwrap_or(attr.gid);
        Ok(attr)
    }
}
