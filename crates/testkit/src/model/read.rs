//! The calls that read the model.

use std::ops::{ControlFlow, Range};

use offshoot_vfs::{Attr, DirEntry, Errno, FileFlags, FileId, FileSystem, Parent, Result, StatFs};

use super::{Model, ModelManners, NodeBody, ROOT, id, posix};

/// The most that `read_data` shows at once, in bytes.
const PIECE_BYTES: u64 = 1 << 20;

impl FileSystem for Model {
    fn root(&self) -> FileId {
        id(ROOT)
    }

    fn statfs(&self) -> Result<StatFs> {
        Ok(StatFs { total_bytes: 0, used_bytes: 0, available_bytes: u64::MAX, block_size: 4096 })
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        self.state().lookup(dir, name)
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        Ok(self.state().directory(dir)?.parent.clone())
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        let state = self.state();
        let node = state.node(file)?;
        let allocated_bytes = match &node.body {
            NodeBody::Regular(contents) => contents.allocated_bytes(),
            _ => 0,
        };
        // A directory that was removed while it was open has no links.
        let nlink = match &node.body {
            NodeBody::Directory(dir)
                if state.manners == ModelManners::Xfs && node.attr.nlink > 0 =>
            {
                2 + state.subdirectories(dir)?
            }
            _ => node.attr.nlink,
        };
        Ok(Attr { allocated_bytes, nlink, ..node.attr })
    }

    fn flags(&self, file: FileId) -> Result<FileFlags> {
        Ok(self.state().node(file)?.flags)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let state = self.state();
        for (&cookie, (name, ino)) in state.directory(dir)?.entries.range(after + 1..) {
            let file = id(*ino);
            let entry = DirEntry { name, file, file_type: state.file_type(file)?, cookie };
            if visit(entry).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        match &self.state().node(file)?.body {
            NodeBody::Symlink(target) => Ok(target.clone()),
            _ => posix(Errno::INVAL, file),
        }
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        let value = self.state().node(file)?.xattrs.get(name).cloned();
        value.map_or_else(|| posix(Errno::NODATA, file), Ok)
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let xattrs = self.state().node(file)?.xattrs.clone();
        for (name, value) in &xattrs {
            if visit(name, value).is_break() {
                break;
            }
        }
        Ok(())
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let state = self.state();
        let contents = state.contents(file)?;
        let available = state.node(file)?.attr.size.saturating_sub(offset);
        let len = buf.len().min(usize::try_from(available).unwrap_or(usize::MAX));
        contents.read(offset, &mut buf[..len]);
        Ok(len)
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut at = range.start;
        while let Some(data) = self.next_data(file, at)?.filter(|data| data.start < range.end) {
            let end = data.end.min(range.end).min(data.start + PIECE_BYTES);
            let mut bytes = vec![0; usize::try_from(end - data.start).expect("a piece is small")];
            self.read(file, data.start, &mut bytes)?;
            visit(data.start, &bytes)?;
            at = end;
        }
        Ok(())
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let state = self.state();
        let contents = state.contents(file)?;
        Ok(contents.next_data(offset, state.node(file)?.attr.size))
    }

    fn prefetch(&self, _files: &[FileId]) {}
}
