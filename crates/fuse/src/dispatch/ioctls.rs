//! Ioctls of files and of the volume.
//!
//! | ioctl | program | allowed to |
//! |---|---|---|
//! | `FS_IOC_GETFLAGS`, `FS_IOC_FSGETXATTR`, `FS_IOC_GETVERSION` | `lsattr`, `xfs_io` | all users |
//! | `FS_IOC_SETFLAGS`, `FS_IOC_FSSETXATTR` | `chattr`, `xfs_io` | as the kernel decides |
//! | `FS_IOC_GETFSLABEL` | `btrfs filesystem label` | all users |
//! | `FS_IOC_SETFSLABEL`, `FITRIM`, `FS_IOC_SHUTDOWN` | the same, `fstrim`, `xfs_io` | root, and the user who serves the mount |
//!
//! All others on directories go to [`Ioctls`](crate::Ioctls).
//!
//! The kernel copies as many bytes in each direction as the number of an ioctl says. That of
//! `FS_IOC_SHUTDOWN` says that it only returns something, so its argument, which says what is
//! stored before, does not come. This module follows its strictest value: it stores everything.

use std::sync::Arc;

use offshoot_vfs::{Errno, Error, FileFlags, FileId, Result, Timestamp, Volume};

use super::{RequestContext, UNKNOWN};
use crate::attributes::generation;
use crate::ioctls::Ioctl;
use crate::output::AnswerBody;
use crate::request::RequestArguments;
use crate::wire::{
    FsXattr, IOCTL_DIR, IoctlIn, IoctlOut, LABEL_BYTES, TrimRange, ioctl_number, opcode,
};

/// Flags in both encodings: that of `FS_IOC_GETFLAGS`, and that of `FS_IOC_FSGETXATTR`.
const XFLAGS: [(FileFlags, u32); 5] = [
    (FileFlags::IMMUTABLE, 0x08),
    (FileFlags::APPEND, 0x10),
    (FileFlags::SYNC, 0x20),
    (FileFlags::NOATIME, 0x40),
    (FileFlags::NODUMP, 0x80),
];

/// The flags in the encoding of `FS_IOC_FSGETXATTR`, which has only some of them.
fn xflags(flags: FileFlags) -> u32 {
    XFLAGS.iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, bit)| bit).sum()
}

/// `flags` with those changed that the other encoding has. `None` for flags and sizes that btrfs
/// does not have.
fn with_xflags(flags: FileFlags, wanted: &FsXattr) -> Option<FileFlags> {
    let known: u32 = XFLAGS.iter().map(|(_, bit)| bit).sum();
    if wanted.xflags & !known != 0 || [wanted.extsize, wanted.projid, wanted.cowextsize] != [0; 3] {
        return None;
    }
    let mut flags = flags;
    for (flag, bit) in XFLAGS {
        flags.set(flag, wanted.xflags & bit != 0);
    }
    Some(flags)
}

impl RequestContext<'_> {
    pub(super) fn ioctl(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let ioctl: IoctlIn = arguments.take()?;
        let file = self.file()?;
        // A failure sends nothing of what is in `out`.
        out.put(&IoctlOut::default())?;
        match ioctl.cmd {
            ioctl_number::GETFLAGS => out.put(&self.fs().flags(file)?.bits()),
            ioctl_number::FSGETXATTR => {
                let xflags = xflags(self.fs().flags(file)?);
                out.put(&FsXattr { xflags, ..FsXattr::default() })
            }
            ioctl_number::SETFLAGS => {
                self.set_flags(file, FileFlags::from_bits_retain(arguments.take::<u32>()?))
            }
            ioctl_number::FSSETXATTR => {
                let wanted: FsXattr = arguments.take()?;
                let flags = with_xflags(self.fs().flags(file)?, &wanted).ok_or_else(|| {
                    Error::posix(Errno::OPNOTSUPP, format!("{wanted:x?} for {file}"))
                })?;
                self.set_flags(file, flags)
            }
            ioctl_number::GETVERSION | ioctl_number::GETVERSION_32 => {
                out.put(&generation(&self.fs().attr(file)?))
            }
            ioctl_number::GETFSLABEL => {
                let label = self.volume(&ioctl)?.label();
                let mut bytes = [0; LABEL_BYTES];
                let len = label.len().min(LABEL_BYTES);
                bytes[..len].copy_from_slice(&label[..len]);
                out.put(&bytes)
            }
            ioctl_number::SETFSLABEL => {
                let volume = self.volume_of_manager(&ioctl)?;
                let label: [u8; LABEL_BYTES] = arguments.take()?;
                let end = label.iter().position(|&byte| byte == 0);
                let too_long = || Error::posix(Errno::INVAL, "a label without an end");
                volume.set_label(&label[..end.ok_or_else(too_long)?])?;
                self.fs().sync()
            }
            ioctl_number::FITRIM => {
                let volume = self.volume_of_manager(&ioctl)?;
                let mut range: TrimRange = arguments.take()?;
                if range.len < volume.block_size().into() || range.start == u64::MAX {
                    return Err(Error::posix(Errno::INVAL, "trimming less than a block"));
                }
                // `minlen` lets a filesystem skip small ranges. This one skips none.
                let end = range.start.saturating_add(range.len);
                range.len = volume.trim(range.start..end)?.bytes;
                out.put(&range)
            }
            ioctl_number::SHUTDOWN => {
                let volume = self.volume_of_manager(&ioctl)?;
                self.to.shut_down(&**volume)
            }
            _ => self.pass_on(&ioctl, arguments, out),
        }
    }

    fn set_flags(&self, file: FileId, flags: FileFlags) -> Result<()> {
        let writing = self.to.writing.read();
        self.to.require_up(opcode::IOCTL)?;
        self.fs().set_flags(file, flags, Timestamp::now())?;
        drop(writing);
        // The kernel expects no new change time after an ioctl.
        self.to.caches.forget_attributes(file)
    }

    /// The volume, for an ioctl that is about it.
    fn volume(&self, ioctl: &IoctlIn) -> Result<&Arc<dyn Volume>> {
        self.to.options.volume.as_ref().ok_or_else(|| unknown(ioctl))
    }

    /// The volume, for an ioctl that only root may use, and the user who serves the mount.
    fn volume_of_manager(&self, ioctl: &IoctlIn) -> Result<&Arc<dyn Volume>> {
        self.require_known(ioctl)?;
        if self.uid != 0 && self.uid != self.to.manager {
            let what = format!("ioctl {:#x} of user {}", ioctl.cmd, self.uid);
            return Err(Error::posix(Errno::PERM, what));
        }
        self.volume(ioctl)
    }

    /// `EACCES` when the kernel does not say which user makes the ioctl.
    fn require_known(&self, ioctl: &IoctlIn) -> Result<()> {
        if self.uid != UNKNOWN {
            return Ok(());
        }
        Err(Error::posix(Errno::ACCESS, format!("ioctl {:#x} of an unknown user", ioctl.cmd)))
    }

    fn pass_on(
        &self,
        ioctl: &IoctlIn,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let others = self.to.options.ioctls.as_ref().filter(|_| ioctl.flags & IOCTL_DIR != 0);
        let others = others.ok_or_else(|| unknown(ioctl))?;
        self.require_known(ioctl)?;
        let room = out.room();
        let asked = Ioctl {
            directory: ioctl.fh,
            uid: self.uid,
            gid: self.gid,
            command: ioctl.cmd,
            data: arguments.data(ioctl.in_size)?,
            most_bytes: usize::try_from(ioctl.out_size).map_or(room, |size| size.min(room)),
        };
        let answer = others.answer(&asked)?;
        if answer.len() > asked.most_bytes {
            let what = format!("an answer of {} bytes to ioctl {:#x}", answer.len(), ioctl.cmd);
            return Err(Error::posix(Errno::RANGE, what));
        }
        out.put_bytes(&answer)
    }
}

fn unknown(ioctl: &IoctlIn) -> Error {
    Error::posix(Errno::NOTTY, format!("ioctl {:#x}", ioctl.cmd))
}
