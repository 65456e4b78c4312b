//! Targets of symbolic links.

use offshoot_vfs::{Errno, Error, FileType, Result};
use offshoot_xfs_format::FileBlock;
use offshoot_xfs_format::remote::RemoteKind;
use offshoot_xfs_format::symlink::{MAX_LEN, check};

use crate::buffer::{XfsBuffers, malformed};
use crate::inode::LoadedInode;
use crate::inode::fork::ForkContents;
use crate::remote;

/// The target of a link; `EINVAL` for another file.
pub(crate) fn target(buffers: &XfsBuffers, inode: &LoadedInode) -> Result<Vec<u8>> {
    if inode.file_type()? != FileType::Symlink {
        let what = format!("{} is not a symbolic link", inode.file());
        return Err(Error::posix(Errno::INVAL, what));
    }
    let target = if let ForkContents::Local(target) = &inode.data.contents {
        target.to_vec()
    } else {
        // The check of the inode bounds the size of a link, but for 0 in one without a name.
        let len = usize::try_from(inode.core.size.get()).unwrap_or(usize::MAX).clamp(1, MAX_LEN);
        let kind = RemoteKind::SymlinkTarget;
        remote::read(buffers, &inode.data, inode.ino, kind, FileBlock(0), len)?
    };
    check(&target).map_err(malformed)?;
    Ok(target)
}
