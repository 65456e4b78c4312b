//! Makes a model of what another filesystem shows.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;

use offshoot_vfs::{Attr, FileId, FileSystem, FileType, Parent, Result};

use super::contents::SectorContents;
use super::{Model, ModelDirectory, ModelNode, NodeBody, ROOT, id};
use crate::compare::data_ranges;

/// The most data that is copied at once, in bytes.
const PIECE_BYTES: u64 = 1 << 20;

impl Model {
    /// A filesystem that shows what `fs` shows.
    ///
    /// # Errors
    /// Those of `fs`.
    pub fn copy(fs: &dyn FileSystem) -> Result<Self> {
        let mut copy =
            Copy { fs, nodes: BTreeMap::new(), known: HashMap::new(), subvolumes: HashMap::new() };
        copy.node(fs.root())?;
        let mut left = vec![fs.root()];
        while let Some(dir) = left.pop() {
            copy.entries(dir, &mut left)?;
        }
        let model = Self::new(&fs.attr(fs.root())?);
        model.state().next_ino = ROOT + copy.nodes.len() as u64;
        model.state().nodes = copy.nodes;
        Ok(model)
    }
}

struct Copy<'a> {
    fs: &'a dyn FileSystem,
    nodes: BTreeMap<u64, ModelNode>,
    /// The inode number in the model of each file of `fs`.
    known: HashMap<FileId, u64>,
    /// The inode number in the model of the root of each subvolume of `fs`.
    subvolumes: HashMap<u64, u64>,
}

impl Copy<'_> {
    /// Copies the entries of a directory whose node exists. Adds the directories among them to
    /// `left`.
    fn entries(&mut self, dir: FileId, left: &mut Vec<FileId>) -> Result<()> {
        let mut entries = Vec::new();
        self.fs.read_dir(dir, 0, &mut |entry| {
            entries.push((entry.name.to_vec(), entry.file));
            ControlFlow::Continue(())
        })?;
        let mut directory = ModelDirectory::default();
        for (name, file) in entries {
            let ino = self.node(file)?;
            if let Some(ModelNode { body: NodeBody::Directory(below), .. }) =
                self.nodes.get_mut(&ino)
            {
                below.parent = Some(Parent { dir: id(self.known[&dir]), name: name.clone() });
                left.push(file);
            }
            directory.last_cookie += 1;
            directory.names.insert(name.clone(), directory.last_cookie);
            directory.entries.insert(directory.last_cookie, (name, ino));
        }
        if let Some(ModelNode { body: NodeBody::Directory(body), .. }) =
            self.nodes.get_mut(&self.known[&dir])
        {
            directory.parent = body.parent.take();
            *body = directory;
        }
        Ok(())
    }

    /// The inode number of the copy of `file`. Makes the copy if there is none.
    fn node(&mut self, file: FileId) -> Result<u64> {
        if let Some(&ino) = self.known.get(&file) {
            return Ok(ino);
        }
        let ino = ROOT + self.known.len() as u64;
        let mut attr = Attr { file: id(ino), ..self.fs.attr(file)? };
        if attr.file_type == FileType::Directory {
            // Other formats count subdirectories too.
            attr.nlink = 1;
        }
        let body = match attr.file_type {
            FileType::Directory => NodeBody::Directory(ModelDirectory::default()),
            FileType::Symlink => NodeBody::Symlink(self.fs.read_link(file)?),
            FileType::Regular => NodeBody::Regular(self.contents(file)?),
            _ => NodeBody::Other,
        };
        let mut xattrs = BTreeMap::new();
        self.fs.xattrs(file, &mut |name, value| {
            xattrs.insert(name.to_vec(), value.to_vec());
            ControlFlow::Continue(())
        })?;
        self.known.insert(file, ino);
        let flags = self.fs.flags(file)?;
        // The walk meets the root of a subvolume before the files in it.
        let subvolume = *self.subvolumes.entry(file.dev).or_insert(ino);
        let node = ModelNode { attr, subvolume, body, xattrs, flags, opens: 0, is_linkable: false };
        self.nodes.insert(ino, node);
        Ok(ino)
    }

    fn contents(&self, file: FileId) -> Result<SectorContents> {
        let mut contents = SectorContents::default();
        let mut bytes = vec![0; usize::try_from(PIECE_BYTES).expect("it is small")];
        for data in data_ranges(self.fs, file)? {
            let mut at = data.start;
            while at < data.end {
                let len = usize::try_from((data.end - at).min(PIECE_BYTES)).expect("a piece");
                let count = self.fs.read(file, at, &mut bytes[..len])?;
                contents.write(at, &bytes[..count]);
                at += len as u64;
            }
        }
        Ok(contents)
    }
}
