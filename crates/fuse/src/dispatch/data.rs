//! Open files and their data.

use offshoot_vfs::{Errno, Error, Fallocate, FileId, FilePosition, Result, Timestamp};
use rustix::fs::{FallocateFlags, OFlags};

use super::RequestContext;
use super::session::MAX_BYTES;
use crate::output::AnswerBody;
use crate::request::RequestArguments;
use crate::wire::{
    CopyFileRangeIn, FOPEN_KEEP_CACHE, FOPEN_NOFLUSH, FOPEN_PARALLEL_DIRECT_WRITES, FallocateIn,
    LseekIn, LseekOut, OpenIn, OpenOut, ReadIn, ReleaseIn, WRITE_KILL_SUIDGID, WriteIn, WriteOut,
};

/// `whence` of an LSEEK for data.
const SEEK_DATA: u32 = 3;
/// `whence` of an LSEEK for a hole.
const SEEK_HOLE: u32 = 4;

/// The same for every open file. The kernel keeps all that it has cached, and sends no FLUSH. The
/// file needs no handle, because the node says which file it is.
pub(super) fn open_out() -> OpenOut {
    let open_flags = FOPEN_KEEP_CACHE | FOPEN_NOFLUSH | FOPEN_PARALLEL_DIRECT_WRITES;
    OpenOut { open_flags, ..OpenOut::default() }
}

fn mode_of(flags: u32) -> Option<Fallocate> {
    let flags = FallocateFlags::from_bits_retain(flags);
    let (keep, rest) =
        (flags.contains(FallocateFlags::KEEP_SIZE), flags - FallocateFlags::KEEP_SIZE);
    Some(match rest {
        rest if rest.is_empty() => Fallocate::Allocate { keeps_size: keep },
        FallocateFlags::ZERO_RANGE => Fallocate::Zero { keeps_size: keep },
        FallocateFlags::PUNCH_HOLE if keep => Fallocate::PunchHole,
        FallocateFlags::COLLAPSE_RANGE if !keep => Fallocate::Collapse,
        FallocateFlags::INSERT_RANGE if !keep => Fallocate::Insert,
        _ => return None,
    })
}

impl RequestContext<'_> {
    pub(super) fn open(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let open: OpenIn = arguments.take()?;
        let flags = OFlags::from_bits_retain(open.flags);
        let file = self.file()?;
        if flags.intersects(OFlags::WRONLY | OFlags::RDWR) {
            self.require_writable(file, flags.contains(OFlags::APPEND))?;
        }
        self.to.mappable.opened(file, open.flags);
        out.put(&open_out())
    }

    pub(super) fn release(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let release: ReleaseIn = arguments.take()?;
        self.to.mappable.closed(self.file()?, release.flags);
        Ok(())
    }

    /// Refuses to open a file for writing that cannot be written. It finds out by a write of 0
    /// bytes: at the end of the file for an opening with `O_APPEND`, and elsewhere otherwise, which
    /// a file that only takes appends refuses.
    fn require_writable(&self, file: FileId, appends: bool) -> Result<()> {
        let size = self.fs().attr(file)?.size;
        let offset = if appends { size } else { u64::from(size == 0) };
        self.fs().write(file, offset, &[], Timestamp::now())
    }

    pub(super) fn read(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let read: ReadIn = arguments.take()?;
        let file = self.file()?;
        let len = usize::try_from(read.size.min(MAX_BYTES)).expect("1 MiB");
        out.fill(len, |space| self.fs().read(file, read.offset, space))
    }

    pub(super) fn write(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let write: WriteIn = arguments.take()?;
        let data = arguments.data(write.size)?;
        let file = self.file()?;
        let now = Timestamp::now();
        if write.write_flags & WRITE_KILL_SUIDGID != 0 {
            self.drop_set_id(file)?;
        }
        if OFlags::from_bits_retain(write.flags).contains(OFlags::DIRECT) {
            self.fs().write_direct(file, write.offset, data, now)?;
        } else {
            self.fs().write(file, write.offset, data, now)?;
        }
        out.put(&WriteOut { size: write.size, padding: 0 })
    }

    /// The kernel alone knows what programs stored through mappings. So while a mapping of the file
    /// can exist, all of the file is data.
    pub(super) fn lseek(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        let seek: LseekIn = arguments.take()?;
        let file = self.file()?;
        let is_mappable = self.to.mappable.contains(file);
        let offset = match seek.whence {
            SEEK_DATA | SEEK_HOLE if is_mappable => {
                let size = self.fs().attr(file)?.size;
                if seek.offset >= size {
                    return Err(Error::posix(Errno::NXIO, format!("{file} ends before")));
                }
                if seek.whence == SEEK_DATA { seek.offset } else { size }
            }
            SEEK_DATA => self.fs().seek_data(file, seek.offset)?,
            SEEK_HOLE => self.fs().seek_hole(file, seek.offset)?,
            other => return Err(Error::posix(Errno::INVAL, format!("seeking by {other}"))),
        };
        out.put(&LseekOut { offset })
    }

    pub(super) fn fallocate(&self, mut arguments: RequestArguments<'_>) -> Result<()> {
        let wanted: FallocateIn = arguments.take()?;
        let what = mode_of(wanted.mode).ok_or_else(|| {
            Error::posix(Errno::OPNOTSUPP, format!("fallocate with {:#x}", wanted.mode))
        })?;
        let file = self.file()?;
        self.drop_set_id_unless_root(file)?;
        self.fs().fallocate(file, what, wanted.offset, wanted.length, Timestamp::now())
    }

    pub(super) fn copy_file_range(
        &self,
        mut arguments: RequestArguments<'_>,
        out: &mut AnswerBody<'_>,
    ) -> Result<()> {
        /// The largest length that the 32 bits of the answer can count and that ends on a block
        /// boundary, whatever the block size.
        const MOST: u64 = 1 << 31;
        let copy: CopyFileRangeIn = arguments.take()?;
        let from = FilePosition { file: self.file()?, offset: copy.off_in };
        let to = FilePosition { file: self.to.nodes.file(copy.nodeid_out)?, offset: copy.off_out };
        self.drop_set_id_unless_root(to.file)?;
        let copied = self.fs().copy_range(from, to, copy.len.min(MOST), Timestamp::now())?;
        let size = u32::try_from(copied).expect("no more than was asked for");
        out.put(&WriteOut { size, padding: 0 })
    }
}
