//! Which volume is mounted where, by `/proc/self/mountinfo`.
//!
//! Every user may mount a filesystem with any type name, with `fusermount3`. So only mounts of root
//! and of the caller are *trusted*. The mounts of other users are listed and can be unmounted, but
//! this program sends them no requests.
//!
//! ```text
//! 36 35 0:45 / /mnt rw,nosuid,nodev - fuse.offshoot /images/disk.img rw,user_id=0,...
//! 38 35 8:17 / /srv rw,nosuid,nodev - fuseblk.offshoot /dev/sdb1 rw,user_id=0,...
//! id    dev  |  where                kind          what
//!            what of it is mounted: not its root, where it is bound
//! ```

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use offshoot_vfs::Errno;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::process::getuid;

use super::gate;
use crate::disk::DiskName;
use crate::exit::{Result, VerbFailure};

/// The FUSE subtype of mounts of this program.
pub(super) const SUBTYPE: &str = "offshoot";

/// A mount of this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mounted {
    /// The device number, as `MAJOR:MINOR`.
    pub(super) device: String,
    /// The device number is that of a block device, which the mount holds.
    pub(super) is_block: bool,
    /// The volume.
    pub(super) source: PathBuf,
}

impl Mounted {
    /// The number of the connection to the serving process: the device number, as the kernel keeps
    /// it.
    pub(super) fn connection(&self) -> Option<u32> {
        let (major, minor) = self.device.split_once(':')?;
        Some(major.parse::<u32>().ok()?.checked_mul(1 << 20)? | minor.parse::<u32>().ok()?)
    }
}

/// The mount of this program over `dir`.
///
/// # Errors
/// `EINVAL` if there is none, and a refusal if another user has mounted it.
pub(super) fn find(dir: &Path) -> Result<Mounted> {
    find_line(dir).map(|line| line.mounted)
}

/// The table line of the mount of this program over `dir`.
///
/// # Errors
/// `EINVAL` if there is none, and a refusal if another user has mounted it.
pub(super) fn find_line(dir: &Path) -> Result<MountTableLine> {
    let line = find_of_anybody(dir)?;
    line.require_trust()?;
    Ok(line)
}

/// Like [`find_line`], for a mount of any user.
pub(super) fn find_of_anybody(dir: &Path) -> Result<MountTableLine> {
    // The last mount in the table is on top.
    let top = lines()?.into_iter().rev().find(|line| line.dir == dir.as_os_str());
    top.filter(|line| line.is_ours).ok_or_else(|| {
        let what = format!("{}: no volume is mounted there with offshoot", dir.display());
        VerbFailure::Host(what, Errno::INVAL.into())
    })
}

/// A directory in a mount of this program.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Inside {
    /// The device number of the mount.
    pub(super) device: String,
    /// The path in the tree that was mounted.
    pub(super) path: PathBuf,
}

impl Inside {
    /// The tree that contains the path: the device number, and the id of the subvolume if the path
    /// leads through the gate.
    pub(super) fn tree(&self) -> (String, Option<u64>) {
        (self.device.clone(), gate::split(&self.path).map(|(id, _)| id))
    }
}

/// Whether the process that served the mount over `dir` has ended.
pub(super) fn is_dead(dir: &Path) -> bool {
    // The last two, over `/dev/fuse` and over io_uring, when it ended after it was asked.
    let errors = [Errno::NOTCONN, Errno::CONNABORTED, Errno::CANCELED];
    rustix::fs::statfs(dir).is_err_and(|errno| errors.contains(&errno))
}

/// The trusted mounts of this program that show `volume`, under any of its names.
pub(super) fn places_of_volume(volume: &Path) -> Result<Vec<MountTableLine>> {
    let Some(id) = DiskName::parse(volume).id() else { return Ok(Vec::new()) };
    let is_it = |source: &Path| DiskName::parse(source).id().as_ref() == Some(&id);
    let is_of_it = |line: &MountTableLine| {
        line.is_ours && line.is_trusted() && is_it(line.mounted.source.as_ref())
    };
    Ok(lines()?.into_iter().filter(is_of_it).collect())
}

/// The mount of this program that contains the directory `dir`, and the path in it. `dir` must
/// contain no symbolic links.
pub(super) fn inside(dir: &Path) -> Result<Option<Inside>> {
    let failed = |errno: Errno| VerbFailure::Host(dir.display().to_string(), errno.into());
    let found = statx(CWD, dir, AtFlags::empty(), StatxFlags::MNT_ID).map_err(failed)?;
    if found.stx_mask & StatxFlags::MNT_ID.bits() == 0 {
        return Ok(None);
    }
    let line = lines()?.into_iter().find(|line| line.is_ours && line.id == found.stx_mnt_id);
    let Some(line) = line else { return Ok(None) };
    line.require_trust()?;
    Ok(line.inside(dir))
}

/// All mount points of the mount with this device number.
pub(super) fn places_of(device: &str) -> Result<Vec<PathBuf>> {
    let lines = lines()?.into_iter().filter(|line| line.mounted.device == device);
    Ok(lines.map(|line| line.dir.into()).collect())
}

/// All lines of the table.
pub(super) fn lines() -> Result<Vec<MountTableLine>> {
    let path = "/proc/self/mountinfo";
    let table = fs::read(path).map_err(|error| VerbFailure::Host(path.to_owned(), error))?;
    Ok(table.split(|&byte| byte == b'\n').filter_map(MountTableLine::parse).collect())
}

/// A line of the table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MountTableLine {
    /// The id of the mount.
    id: u64,
    /// The directory of the mounted tree that is visible there.
    pub(super) root: PathBuf,
    pub(super) dir: OsString,
    /// This mount point is read-only.
    pub(super) is_read_only_there: bool,
    /// The type of the mount says that it is one of this program.
    pub(super) is_ours: bool,
    /// The user who mounted it, as FUSE reports it.
    pub(super) user: Option<u32>,
    pub(super) mounted: Mounted,
    /// The whole filesystem is read-only.
    pub(super) is_read_only: bool,
}

impl MountTableLine {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut words = line.split(|&byte| byte == b' ');
        let id = std::str::from_utf8(words.next()?).ok()?.parse().ok()?;
        let device = String::from_utf8(words.nth(1)?.to_vec()).ok()?;
        // The kernel adds `//deleted` if a mounted directory has lost its name.
        let root = words.next()?;
        let root = unescaped(root.strip_suffix(b"//deleted").unwrap_or(root)).into();
        let dir = unescaped(words.next()?);
        let is_read_only = |options: &[u8]| options.split(|&byte| byte == b',').any(|o| o == b"ro");
        let is_read_only_there = words.next().is_some_and(is_read_only);
        words.find(|word| word == b"-")?;
        let kind = words.next()?;
        let is_of = |base: &[u8]| kind.strip_prefix(base) == Some(SUBTYPE.as_bytes());
        let is_block = is_of(b"fuseblk.");
        let is_ours = is_block || is_of(b"fuse.");
        let mounted = Mounted { device, is_block, source: unescaped(words.next()?).into() };
        let options = words.next().unwrap_or_default();
        let number = |option: &[u8]| {
            std::str::from_utf8(option.strip_prefix(b"user_id=")?).ok()?.parse().ok()
        };
        let user = options.split(|&byte| byte == b',').find_map(number);
        let is_read_only = is_read_only(options);
        Some(Self { id, root, dir, is_read_only_there, is_ours, user, mounted, is_read_only })
    }

    /// Whether root or the caller mounted it.
    pub(super) fn is_trusted(&self) -> bool {
        self.user.is_some_and(|user| user == 0 || user == getuid().as_raw())
    }

    fn require_trust(&self) -> Result {
        if self.is_trusted() {
            return Ok(());
        }
        let dir = Path::new(&self.dir).display();
        let user = self.user.map_or("another user".to_owned(), |user| format!("user {user}"));
        Err(VerbFailure::Refused(format!(
            "{dir}: {user} mounted that, so it is not asked; only that user can use it as a volume"
        )))
    }

    /// Whether its directory leads to this mount, and not to one that was mounted over it later.
    /// The check sends no request to the serving process.
    pub(super) fn is_on_top(&self) -> bool {
        let found = statx(CWD, &*self.dir, AtFlags::STATX_DONT_SYNC, StatxFlags::MNT_ID);
        found.is_ok_and(|found| {
            found.stx_mask & StatxFlags::MNT_ID.bits() != 0 && found.stx_mnt_id == self.id
        })
    }

    /// The path of `dir` in the mounted tree, if the line shows it.
    fn inside(self, dir: &Path) -> Option<Inside> {
        let below = dir.strip_prefix(&self.dir).ok()?;
        Some(Inside { device: self.mounted.device, path: self.root.join(below) })
    }
}

/// The table writes blanks and similar characters as a backslash and three octal digits.
fn unescaped(text: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        match code.and_then(|digits| u8::from_str_radix(digits, 8).ok()) {
            Some(byte) if first == b'\\' => {
                bytes.push(byte);
                rest = &after[3..];
            }
            _ => {
                bytes.push(first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

/// Sets the read-ahead of the kernel to the size of one request. If this user may not set it, the
/// kernel's default remains.
pub(super) fn read_ahead(mounted: &Mounted) {
    // Without the suffix it would be the read-ahead of the block device.
    let suffix = if mounted.is_block { "-fuseblk" } else { "" };
    let path = format!("/sys/class/bdi/{}{suffix}/read_ahead_kb", mounted.device);
    let _ = fs::write(path, "1024");
}

/// The absolute name of a volume, as it appears in the table too.
pub(super) fn source_name(volume: &Path) -> OsString {
    let DiskName { file, partition } = DiskName::parse(volume);
    let mut name = file.canonicalize().unwrap_or(file).into_os_string();
    if let Some(partition) = partition {
        name.push("@");
        name.push(partition);
    }
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_the_table() {
        let ours =
            b"36 35 0:45 / /mnt/a\\040b rw shared:1 - fuse.offshoot /x\\134y.img rw,user_id=0";
        let line = MountTableLine::parse(ours).expect("a line");
        assert_eq!((line.id, &*line.dir, line.is_ours), (36, "/mnt/a b".as_ref(), true));
        let source = r"/x\y.img".into();
        assert_eq!(line.mounted, Mounted { device: "0:45".into(), is_block: false, source });
        assert_eq!(line.mounted.connection(), Some(45));
        let inside =
            |line: MountTableLine, dir: &str| line.inside(dir.as_ref()).map(|inside| inside.path);
        assert_eq!(inside(line.clone(), "/mnt/a b"), Some("/".into()));
        assert_eq!(inside(line.clone(), "/mnt/a b/c/d"), Some("/c/d".into()));
        assert_eq!(inside(line, "/mnt/a"), None);
        let bound =
            MountTableLine::parse(b"36 35 0:45 /sub\\040vol /b rw - fuse.offshoot /y.img rw");
        assert_eq!(inside(bound.expect("a line"), "/b/c"), Some("/sub vol/c".into()));
        // A mounted directory that was deleted is still found by its old path.
        let gone =
            MountTableLine::parse(b"36 35 0:45 /a\\040b//deleted /b rw - fuse.offshoot /y.img rw");
        let gone = gone.expect("a line");
        assert_eq!((gone.root.as_path(), &*gone.dir), ("/a b".as_ref(), "/b".as_ref()));
        assert_eq!(inside(gone, "/b/c"), Some("/a b/c".into()));
        // Only mounts of root and of the caller are trusted.
        let own = getuid().as_raw();
        let of = |options: &str| {
            let line = format!("36 35 0:45 / /b rw - fuse.offshoot /y.img {options}");
            let line = MountTableLine::parse(line.as_bytes()).expect("a line");
            (line.user, line.is_trusted(), line.require_trust().is_ok())
        };
        assert_eq!(of("rw,user_id=0,group_id=0"), (Some(0), true, true));
        assert_eq!(of(&format!("rw,user_id={own}")), (Some(own), true, true));
        let other = own + 1;
        assert_eq!(of(&format!("rw,user_id={other}")), (Some(other), false, false));
        for odd in ["rw", "rw,user_id=", "rw,user_id=-1", "rw,user_id=0x0", "rw,xuser_id=0"] {
            assert_eq!(of(odd), (None, false, false), "{odd}");
        }
        let block = MountTableLine::parse(b"38 35 8:17 / /s rw - fuseblk.offshoot /dev/sdb1 rw");
        let block = block.expect("a line");
        assert!(block.is_ours && block.mounted.is_block);
        assert_eq!(block.mounted.connection(), Some(8_388_625));
        // Names may contain any bytes.
        let bytes = MountTableLine::parse(b"37 36 0:46 / /mnt/\xff rw - fuse.offshoot /\xfe rw")
            .expect("a line");
        assert_eq!(bytes.dir, OsString::from_vec(b"/mnt/\xff".to_vec()));
        assert_eq!(bytes.mounted.source, PathBuf::from(OsString::from_vec(b"/\xfe".to_vec())));
        let other =
            MountTableLine::parse(b"37 36 0:46 / /mnt/c rw - fuse.sshfs host: rw").expect("a line");
        assert!(!other.is_ours);
        for bad in [
            "",
            " - ",
            "36 35",
            "x 2 3:4 / /m rw - fuse.offshoot y",
            "1 2 3 4 - fuse.offshoot",
            "1 2 3 4 5 - fuse.offshoot",
        ] {
            assert_eq!(MountTableLine::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
