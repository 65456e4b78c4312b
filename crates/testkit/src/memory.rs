//! A filesystem in memory that a test fills with whatever it needs, contradictions included.

use std::collections::BTreeMap;
use std::ops::{ControlFlow, Range};

use offshoot_vfs::{
    Attr, DirEntry, Errno, Error, FileId, FileSystem, FileType, Parent, Result, StatFs, Structure,
    Timestamp,
};

/// The inode number of the root.
pub const ROOT: u64 = 256;

/// The file with the inode number `ino`.
#[must_use]
pub fn id(ino: u64) -> FileId {
    FileId { dev: 5, ino }
}

/// One inode.
pub struct MemoryNode {
    /// What `attr` gives.
    pub attr: Attr,
    /// The names in a directory, and the inodes that they lead to.
    pub entries: Vec<(Vec<u8>, u64)>,
    /// The directory above this one, and the name in it.
    pub parent: Option<(u64, Vec<u8>)>,
    /// The data, each piece with its offset.
    pub pieces: Vec<(u64, Vec<u8>)>,
    /// The target of a symbolic link.
    pub target: Vec<u8>,
    /// Names and values of the extended attributes.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Reading its data fails after the pieces.
    pub is_damaged: bool,
    /// The directory goes on forever.
    pub is_endless: bool,
}

/// Called with the name of each lookup.
type OnLookup = Box<dyn Fn(&[u8]) + Send + Sync>;

/// The filesystem: all inodes by number.
#[derive(Default)]
pub struct MemoryFilesystem {
    /// All inodes.
    pub nodes: BTreeMap<u64, MemoryNode>,
    /// What a lookup does first; it may wait.
    pub on_lookup: Option<OnLookup>,
}

impl MemoryFilesystem {
    /// A filesystem with an empty root.
    #[must_use]
    pub fn new() -> Self {
        let mut memory = Self::default();
        memory.node(ROOT, FileType::Directory);
        memory
    }

    /// Makes an inode without a name.
    pub fn node(&mut self, ino: u64, file_type: FileType) -> &mut MemoryNode {
        let time = |secs| Timestamp { secs, nanos: 123_456_789 };
        let attr = Attr {
            file: id(ino),
            file_type,
            permissions: if file_type == FileType::Directory { 0o755 } else { 0o644 },
            nlink: 1,
            uid: rustix::process::geteuid().as_raw(),
            gid: rustix::process::getegid().as_raw(),
            rdev: (0, 0),
            size: 0,
            allocated_bytes: 0,
            atime: time(1_000_000_000),
            mtime: time(1_100_000_000),
            ctime: time(1_200_000_000),
            btime: time(900_000_000),
            generation: 0,
        };
        self.nodes.entry(ino).or_insert(MemoryNode {
            attr,
            entries: Vec::new(),
            parent: None,
            pieces: Vec::new(),
            target: Vec::new(),
            xattrs: Vec::new(),
            is_damaged: false,
            is_endless: false,
        })
    }

    /// Gives an inode a name, even if that contradicts the rest of the tree.
    pub fn enter(&mut self, parent: u64, name: &[u8], ino: u64) {
        self.nodes.get_mut(&parent).expect("the parent").entries.push((name.to_vec(), ino));
    }

    /// Makes an inode with a name.
    pub fn add(
        &mut self,
        parent: u64,
        name: &[u8],
        ino: u64,
        file_type: FileType,
    ) -> &mut MemoryNode {
        self.node(ino, file_type).parent = Some((parent, name.to_vec()));
        self.enter(parent, name, ino);
        self.node(ino, file_type)
    }

    /// Makes a regular file with data at its beginning.
    pub fn file(&mut self, parent: u64, name: &[u8], ino: u64, data: &[u8]) -> &mut MemoryNode {
        let node = self.add(parent, name, ino, FileType::Regular);
        node.attr.size = data.len() as u64;
        node.pieces = vec![(0, data.to_vec())];
        node
    }

    fn get(&self, file: FileId) -> Result<&MemoryNode> {
        self.nodes.get(&file.ino).ok_or_else(|| Error::posix(Errno::NOENT, file.to_string()))
    }
}

impl FileSystem for MemoryFilesystem {
    fn root(&self) -> FileId {
        id(ROOT)
    }

    fn statfs(&self) -> Result<StatFs> {
        Ok(StatFs { total_bytes: 0, used_bytes: 0, available_bytes: 0, block_size: 4096 })
    }

    fn lookup(&self, dir: FileId, name: &[u8]) -> Result<FileId> {
        if let Some(happens) = &self.on_lookup {
            happens(name);
        }
        let node = self.get(dir)?;
        if node.attr.file_type != FileType::Directory {
            return Err(Error::posix(Errno::NOTDIR, dir.to_string()));
        }
        let entry = node.entries.iter().find(|(entry, _)| entry == name);
        entry.map(|(_, ino)| id(*ino)).ok_or_else(|| Error::posix(Errno::NOENT, dir.to_string()))
    }

    fn parent(&self, dir: FileId) -> Result<Option<Parent>> {
        let parent = self.get(dir)?.parent.clone();
        Ok(parent.map(|(dir, name)| Parent { dir: id(dir), name }))
    }

    fn attr(&self, file: FileId) -> Result<Attr> {
        Ok(self.get(file)?.attr)
    }

    fn read_dir(
        &self,
        dir: FileId,
        after: u64,
        visit: &mut dyn FnMut(DirEntry<'_>) -> ControlFlow<()>,
    ) -> Result<()> {
        let node = self.get(dir)?;
        let count = node.entries.len() as u64;
        let mut at = after;
        while at < count || (node.is_endless && count > 0) {
            let (name, ino) = &node.entries[usize::try_from(at % count).expect("small")];
            // An endless directory starts over, cookies included.
            let cookie = at % count + 1;
            let file_type = self.get(id(*ino)).map_or(FileType::Regular, |n| n.attr.file_type);
            if visit(DirEntry { name, file: id(*ino), file_type, cookie }).is_break() {
                break;
            }
            at += 1;
        }
        Ok(())
    }

    fn read_link(&self, file: FileId) -> Result<Vec<u8>> {
        Ok(self.get(file)?.target.clone())
    }

    fn xattr(&self, file: FileId, name: &[u8]) -> Result<Vec<u8>> {
        let found = self.get(file)?.xattrs.iter().find(|(xattr, _)| xattr == name);
        found.map(|(_, value)| value.clone()).ok_or(Error::posix(Errno::NODATA, ""))
    }

    fn xattrs(
        &self,
        file: FileId,
        visit: &mut dyn FnMut(&[u8], &[u8]) -> ControlFlow<()>,
    ) -> Result<()> {
        let xattrs = &self.get(file)?.xattrs;
        let _ = xattrs.iter().try_for_each(|(name, value)| visit(name, value));
        Ok(())
    }

    fn read(&self, file: FileId, offset: u64, buf: &mut [u8]) -> Result<usize> {
        let size = self.get(file)?.attr.size;
        let len = size.saturating_sub(offset).min(buf.len() as u64);
        let len = usize::try_from(len).expect("at most the buffer");
        buf[..len].fill(0);
        self.read_data(file, offset..offset + len as u64, &mut |at, data| {
            let at = usize::try_from(at - offset).expect("in the range");
            buf[at..at + data.len()].copy_from_slice(data);
            Ok(())
        })?;
        Ok(len)
    }

    fn read_data(
        &self,
        file: FileId,
        range: Range<u64>,
        visit: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let node = self.get(file)?;
        for (offset, data) in &node.pieces {
            let end = offset + data.len() as u64;
            if end <= range.start || *offset >= range.end {
                continue;
            }
            let from = usize::try_from(range.start.saturating_sub(*offset)).expect("small");
            // A piece that reaches past the end of the file is shown as it is: the test wants that
            // lie.
            let to = if end > node.attr.size { end } else { end.min(range.end) };
            let to = usize::try_from(to - offset).expect("small");
            visit(offset + from as u64, &data[from..to])?;
        }
        if node.is_damaged {
            return Err(Error::corrupt_at(Structure::Data, 1 << 20, "checksum"));
        }
        Ok(())
    }

    fn next_data(&self, file: FileId, offset: u64) -> Result<Option<Range<u64>>> {
        let node = self.get(file)?;
        let mut ranges = node.pieces.iter().map(|(at, data)| *at..*at + data.len() as u64);
        Ok(ranges.find(|range| range.end > offset).map(|range| range.start.max(offset)..range.end))
    }

    fn prefetch(&self, _files: &[FileId]) {}
}
