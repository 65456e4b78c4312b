//! What a filesystem shows, in a form in which each file and each name can be judged by itself.
//!
//! A file is identified by its owner, which the workload makes unique, and by its subvolume,
//! because a snapshot has the same files as its source. A subvolume is identified by its creation
//! time. The root has 0 for both.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::ops::{ControlFlow, Range};
use std::sync::Arc;

use offshoot_vfs::{Error, FileFlags, FileId, FileSystem, FileType, Result, Structure, Timestamp};
use xxhash_rust::xxh64::xxh64;

use super::manners::EngineManners;
use crate::compare::data_ranges;
use crate::model::subvolumes::{Settings, SubvolumeCalls};

/// The identity of a file. The low 32 bits are the number of the operation that made the file; the
/// high 32 bits are the number of the operation that made its subvolume.
pub(super) type PictureId = u64;

/// The root directory.
pub(super) const ROOT: PictureId = 0;

/// The unit in which data reaches a volume, in bytes.
pub(super) const SECTOR: u64 = 4096;

/// The maximal length of [`PictureFile::head`], in bytes.
const HEAD: u64 = 128 << 10;

/// A name: its directory, and the name in it.
pub(super) type PictureName = (PictureId, Vec<u8>);

/// Everything below the root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Picture {
    pub(super) names: BTreeMap<PictureName, PictureId>,
    pub(super) files: BTreeMap<PictureId, PictureFile>,
}

/// One file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PictureFile {
    pub(super) kind: FileType,
    pub(super) permissions: u32,
    pub(super) nlink: u32,
    pub(super) size: u64,
    pub(super) mtime: Timestamp,
    pub(super) ctime: Timestamp,
    /// All flags except NOCOMPRESS, which the engine sets itself when compression saved nothing.
    pub(super) flags: FileFlags,
    /// The major and minor number of a device.
    pub(super) rdev: (u32, u32),
    pub(super) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(super) target: Vec<u8>,
    /// A hash of each unit of the data ([`EngineManners::data_unit`]), the last one padded with
    /// zeros. `None` if the data is corrupt in every mirror.
    pub(super) sectors: Option<Vec<u64>>,
    /// The first bytes of the data, of which parts can be compared.
    pub(super) head: Arc<[u8]>,
    /// The space that is allocated but holds no data, in bytes.
    pub(super) preallocated: u64,
    /// The settings of the subvolume, if this is the root of one.
    pub(super) settings: Option<Settings>,
}

/// Takes the picture of a filesystem.
///
/// # Errors
/// Errors of `fs`, and structures that contradict each other: a name that leads nowhere, a
/// directory with two names.
pub(super) fn take(
    fs: &dyn FileSystem,
    subvolumes: &dyn SubvolumeCalls,
    manners: EngineManners,
) -> Result<Picture> {
    let unit = manners.data_unit();
    let mut picture = Picture::default();
    let mut seen = BTreeMap::new();
    let mut dirs = vec![(fs.root(), ROOT)];
    picture.files.insert(ROOT, file(fs, subvolumes, fs.root(), unit)?);
    while let Some((dir, dir_id)) = dirs.pop() {
        let mut entries = Vec::new();
        fs.read_dir(dir, 0, &mut |entry| {
            entries.push((entry.name.to_vec(), entry.file, entry.file_type));
            ControlFlow::Continue(())
        })?;
        for (name, found, file_type) in entries {
            let shown = name.escape_ascii().to_string();
            let file = id_of(fs, subvolumes, found)
                .and_then(|id| Ok((id, file(fs, subvolumes, found, unit)?)));
            let (id, file) = file.map_err(|e| match e {
                Error::Posix { .. } => misfit(format!("{shown} leads to nothing: {e}")),
                e => e,
            })?;
            if fs.lookup(dir, &name)? != found || file.kind != file_type {
                return Err(misfit(format!("{shown} is listed as something else than it is")));
            }
            if *seen.entry(id).or_insert(found) != found {
                return Err(misfit(format!("{shown} is a copy of file {id}")));
            }
            if file.kind == FileType::Directory {
                if picture.files.contains_key(&id) {
                    return Err(misfit(format!("the directory {shown} has two names")));
                }
                dirs.push((found, id));
            }
            picture.names.insert((dir_id, name), id);
            picture.files.insert(id, file);
        }
    }
    if !manners.has_plain_directories() {
        picture.make_directories_plain()?;
    }
    Ok(picture)
}

fn misfit(problem: String) -> Error {
    Error::corrupt(Structure::Directory, problem)
}

/// The identity of a file.
pub(super) fn id_of(
    fs: &dyn FileSystem,
    subvolumes: &dyn SubvolumeCalls,
    file: FileId,
) -> Result<PictureId> {
    let subvolume = subvolumes.made(file)?.nanos;
    Ok(PictureId::from(subvolume) << 32 | PictureId::from(fs.attr(file)?.uid))
}

fn file(
    fs: &dyn FileSystem,
    subvolumes: &dyn SubvolumeCalls,
    file: FileId,
    unit: u64,
) -> Result<PictureFile> {
    let attr = fs.attr(file)?;
    let mut xattrs = BTreeMap::new();
    fs.xattrs(file, &mut |name, value| {
        xattrs.insert(name.to_vec(), value.to_vec());
        ControlFlow::Continue(())
    })?;
    let is = |file_type| attr.file_type == file_type;
    let mut head = Vec::new();
    let (mut flags, mut preallocated) = (FileFlags::empty(), 0);
    if matches!(attr.file_type, FileType::Regular | FileType::Directory) {
        flags = fs.flags(file)? - FileFlags::NOCOMPRESS;
    }
    if is(FileType::Regular) {
        let sectors = |data: Range<u64>| data.end.div_ceil(SECTOR) - data.start / SECTOR;
        let data: u64 = data_ranges(fs, file)?.into_iter().map(sectors).sum();
        preallocated = attr.allocated_bytes.saturating_sub(data * SECTOR);
    }
    let sectors = match attr.file_type {
        FileType::Regular => match sectors(fs, file, attr.size, unit, &mut head) {
            Err(Error::Corrupt(_)) => None,
            sectors => Some(sectors?),
        },
        _ => Some(Vec::new()),
    };
    Ok(PictureFile {
        kind: attr.file_type,
        permissions: attr.permissions,
        nlink: attr.nlink,
        size: attr.size,
        mtime: attr.mtime,
        ctime: attr.ctime,
        flags,
        rdev: attr.rdev,
        xattrs,
        target: if is(FileType::Symlink) { fs.read_link(file)? } else { Vec::new() },
        sectors,
        head: head.into(),
        preallocated,
        settings: subvolumes.settings(file)?,
    })
}

/// The hashes of all units of data, and the first bytes.
fn sectors(
    fs: &dyn FileSystem,
    file: FileId,
    size: u64,
    unit: u64,
    head: &mut Vec<u8>,
) -> Result<Vec<u64>> {
    /// How much is read at once, in bytes.
    const PIECE: u64 = 256 * SECTOR;
    let unit = usize::try_from(unit).expect("small");
    let mut sectors = Vec::new();
    let mut buf = Vec::new();
    for offset in (0..size).step_by(usize::try_from(PIECE).expect("small")) {
        let len = usize::try_from(PIECE.min(size - offset)).expect("small");
        buf.clear();
        buf.resize(len.next_multiple_of(unit), 0);
        let read = fs.read(file, offset, &mut buf[..len])?;
        if read != len {
            return Err(Error::corrupt(Structure::File, format!("{file} ends before its size")));
        }
        if offset < HEAD {
            head.extend_from_slice(&buf[..len.min(usize::try_from(HEAD).expect("small"))]);
        }
        sectors.extend(buf.chunks(unit).map(|sector| xxh64(sector, 0)));
    }
    Ok(sectors)
}

/// The hash of a unit of data without any.
pub(super) fn hash_of_zeros(unit: u64) -> u64 {
    xxh64(&vec![0; usize::try_from(unit).expect("small")], 0)
}

impl PictureFile {
    /// Whether another version of the file has only other data and other times.
    pub(super) fn differs_in_data_alone(&self, other: &Self) -> bool {
        let Self { mtime, ctime, sectors, head, preallocated, .. } = self.clone();
        Self { mtime, ctime, sectors, head, preallocated, ..other.clone() } == *self
    }
}

impl Picture {
    /// Checks the links of directories that have two, and one for each directory in them. Gives
    /// each directory one link and no size: its size depends on its form.
    fn make_directories_plain(&mut self) -> Result<()> {
        let mut links: BTreeMap<PictureId, u32> = BTreeMap::new();
        for ((dir, _), id) in &self.names {
            let is_dir = self.files[id].kind == FileType::Directory;
            *links.entry(*dir).or_default() += u32::from(is_dir);
        }
        for (id, file) in &mut self.files {
            if file.kind == FileType::Directory {
                let expected = 2 + links.get(id).unwrap_or(&0);
                if file.nlink != expected {
                    let problem =
                        format!("directory {id} has {} links, not {expected}", file.nlink);
                    return Err(misfit(problem));
                }
                (file.nlink, file.size) = (1, 0);
            }
        }
        Ok(())
    }

    /// Shares the first bytes of files with other pictures. Example: 1,500 states of a volume of 18
    /// MiB, most files of which are the same, took 12 GB without that.
    pub(super) fn share_heads(&mut self, known: &mut HashSet<Arc<[u8]>>) {
        for file in self.files.values_mut() {
            if let Some(same) = known.get(&file.head) {
                file.head = same.clone();
            } else {
                known.insert(file.head.clone());
            }
        }
    }

    /// Sets all times to the same value.
    pub(super) fn forget_times(&mut self) {
        for file in self.files.values_mut() {
            (file.mtime, file.ctime) = Default::default();
        }
    }

    /// The picture without preallocated space, for data that is still in memory: its space is not
    /// known yet.
    pub(super) fn without_space(&self) -> Self {
        let mut picture = self.clone();
        picture.files.values_mut().for_each(|file| file.preallocated = 0);
        picture
    }

    /// The names that lead to a file.
    pub(super) fn names_of(&self, id: PictureId) -> BTreeSet<&PictureName> {
        self.names.iter().filter(|(_, to)| **to == id).map(|(name, _)| name).collect()
    }

    /// Whether this name leads to this file.
    pub(super) fn leads(&self, name: &PictureName, id: PictureId) -> bool {
        self.names.get(name) == Some(&id)
    }

    /// Whether this is a name in the root and the only name of a file that is not a directory.
    pub(super) fn is_only_in_root(&self, name: &PictureName, id: PictureId) -> bool {
        let is_file = self.files[&id].kind != FileType::Directory;
        is_file && name.0 == ROOT && self.names_of(id).len() == 1
    }

    /// The files whose data is corrupt.
    pub(super) fn corrupt(&self) -> usize {
        self.files.values().filter(|file| file.sectors.is_none()).count()
    }

    /// The path of a file, for a message.
    pub(super) fn path(&self, id: PictureId) -> String {
        match self.names.iter().find(|(_, to)| **to == id) {
            Some(((dir, name), _)) => format!("{}/{}", self.path(*dir), name.escape_ascii()),
            None => String::new(),
        }
    }
}
