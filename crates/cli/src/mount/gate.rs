//! The path by which root reaches subvolumes outside the mounted tree.
//!
//! One process serves a volume and mounts one subvolume of it. To mount another subvolume
//! elsewhere, it bind-mounts the entry behind the [gate](offshoot_fuse::Gate) that has the
//! subvolume's id as its name. No directory listing shows the gate. The table of mounts does:
//!
//! ```text
//! 41 35 0:45 /offshoot-subvolumes-......../257 /home rw - fuse.offshoot /images/disk.img
//! rw,user_id=0,...
//! ```

use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use offshoot_vfs::NAME_MAX;

/// The name of the gate: one byte longer than the longest name of a file.
pub(super) const NAME: &[u8] = &{
    const BEGINNING: &[u8] = b"offshoot-subvolumes-";
    let mut name = [b'.'; NAME_MAX + 1];
    let mut at = 0;
    while at < BEGINNING.len() {
        name[at] = BEGINNING[at];
        at += 1;
    }
    name
};

/// The path of the subvolume `id` in a mount.
pub(super) fn path(id: u64) -> PathBuf {
    Path::new(std::ffi::OsStr::from_bytes(NAME)).join(id.to_string())
}

/// The subvolume that `name` stands for behind the gate.
pub(super) fn subvolume(name: &[u8]) -> Option<u64> {
    let id: u64 = std::str::from_utf8(name).ok()?.parse().ok()?;
    // Each subvolume has only one name: `0257` is not 257.
    (id.to_string().as_bytes() == name).then_some(id)
}

/// Splits a `path` that begins with `/` and leads through the gate into the subvolume and the path
/// in it.
pub(super) fn split(path: &Path) -> Option<(u64, PathBuf)> {
    let mut parts = path.components();
    match (parts.next(), parts.next(), parts.next()) {
        (
            Some(Component::RootDir),
            Some(Component::Normal(gate)),
            Some(Component::Normal(name)),
        ) if gate.as_bytes() == NAME => {
            Some((subvolume(name.as_bytes())?, Path::new("/").join(parts.as_path())))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_there_and_back() {
        assert_eq!(NAME.len(), 256);
        for id in [5, 256, u64::MAX] {
            let place = Path::new("/").join(path(id));
            assert_eq!(split(&place.join("a/b")), Some((id, "/a/b".into())));
            assert_eq!(split(&place), Some((id, "/".into())));
        }
        for name in ["", "+5", "05", "x", "18446744073709551616"] {
            assert_eq!(subvolume(name.as_bytes()), None, "{name}");
        }
        for other in ["/", "/5/x", "/offshoot-subvolumes-/5/x"] {
            assert_eq!(split(Path::new(other)), None, "{other}");
        }
    }
}
