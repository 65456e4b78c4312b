//! Names of subvolumes in a mount by which root reaches those that are not in the tree that is
//! mounted.
//!
//! One process serves a volume, and what it mounts is one subvolume. Another one is mounted
//! elsewhere as a bind mount of the directory that has such a name.
//! It is longer than any name of a file, so it stands for nothing else, and no listing has it. The
//! table of mounts does:
//!
//! ```text
//! 41 35 0:45 /offshoot-subvolume-257-........ /home rw - fuse.offshoot /images/disk.img
//! rw,user_id=0,...
//! ```

use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};

use offshoot_vfs::NAME_MAX;

const BEGINNING: &[u8] = b"offshoot-subvolume-";

/// The name of the subvolume `id`.
pub(super) fn name(id: u64) -> OsString {
    let name = format!("offshoot-subvolume-{id}-");
    format!("{name:.<width$}", width = NAME_MAX + 1).into()
}

/// The subvolume with this name.
pub(super) fn subvolume(name: &[u8]) -> Option<u64> {
    if name.len() != NAME_MAX + 1 {
        return None;
    }
    let rest = name.strip_prefix(BEGINNING)?;
    let digits = rest.split(|&byte| byte == b'-').next()?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The subvolume in which `path`, that begins with `/`, is by such a name, and the path there.
pub(super) fn split(path: &Path) -> Option<(u64, PathBuf)> {
    let mut parts = path.components();
    let (Some(Component::RootDir), Some(Component::Normal(first))) = (parts.next(), parts.next())
    else {
        return None;
    };
    Some((subvolume(first.as_bytes())?, Path::new("/").join(parts.as_path())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_there_and_back() {
        for id in [5, 256, u64::MAX] {
            let name = name(id);
            assert_eq!((name.len(), subvolume(name.as_bytes())), (256, Some(id)));
            let below = Path::new("/").join(&name).join("a/b");
            assert_eq!(split(&below), Some((id, "/a/b".into())));
            assert_eq!(split(&Path::new("/").join(&name)), Some((id, "/".into())));
        }
        assert_eq!(subvolume(b"offshoot-subvolume-5-"), None);
        assert_eq!(split(Path::new("/offshoot-subvolume-5-/x")), None);
        assert_eq!(split(Path::new("/")), None);
    }
}
