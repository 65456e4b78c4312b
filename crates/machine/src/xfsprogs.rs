//! `xfsprogs`, of the system or the newer ones that `cargo xtask setup` keeps beside the build.

use std::path::PathBuf;

use crate::run::try_run;
use crate::target_dir;

/// The oldest `xfsprogs`, as (major, minor), that make and check everything the tests need.
pub const XFSPROGS_AT_LEAST: (u32, u32) = (6, 13);

/// The programs that tests call.
pub const XFS_PROGRAMS: [&str; 5] = ["mkfs.xfs", "xfs_repair", "xfs_db", "xfs_io", "xfs_logprint"];

/// Where setup keeps the newer `xfsprogs`. Its folder `bin` has the programs.
#[must_use]
pub fn kept_xfsprogs() -> PathBuf {
    target_dir().join("tools/xfsprogs")
}

/// One installation of `xfsprogs`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XfsProgs {
    /// The folder of the programs; `None` for those of the system.
    folder: Option<PathBuf>,
    version: (u32, u32),
}

impl XfsProgs {
    /// The newest programs that are here, if there are any.
    #[must_use]
    pub fn newest() -> Option<Self> {
        let kept = Self::in_folder(Some(kept_xfsprogs().join("bin")));
        // The programs of the system win if both are equal.
        kept.into_iter().chain(Self::in_folder(None)).max_by_key(|progs| progs.version)
    }

    fn in_folder(folder: Option<PathBuf>) -> Option<Self> {
        let mut progs = Self { folder, version: (0, 0) };
        for program in XFS_PROGRAMS {
            let said = try_run(&progs.program(program), &["-V"]).ok()?;
            progs.version = xfsprogs_version(&said)?;
        }
        Some(progs)
    }

    /// The version as (major, minor).
    #[must_use]
    pub fn version(&self) -> (u32, u32) {
        self.version
    }

    /// What runs the program of this name.
    #[must_use]
    pub fn program(&self, name: &str) -> String {
        let folder = self.folder.as_ref();
        folder.map_or_else(|| name.to_owned(), |folder| folder.join(name).display().to_string())
    }
}

/// The version in `mkfs.xfs version 6.13.0`, as (major, minor).
fn xfsprogs_version(output: &str) -> Option<(u32, u32)> {
    let mut words = output.split_whitespace().skip_while(|word| *word != "version");
    let mut parts = words.nth(1)?.split('.');
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_xfsprogs_print_them() {
        assert_eq!(xfsprogs_version("mkfs.xfs version 6.13.0\n"), Some((6, 13)));
        assert_eq!(xfsprogs_version("xfs_io version 6.1.0"), Some((6, 1)));
        assert_eq!(xfsprogs_version("something else"), None);
    }
}
