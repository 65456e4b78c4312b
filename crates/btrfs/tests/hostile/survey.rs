//! Does everything once that the library can do with a volume, and records the results.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs::{BtrfsVolume, EngineOptions, RecoveredFiles, Rescue};
use offshoot_btrfs_format::csum::ChecksumType;
use offshoot_btrfs_format::{ItemType, Key, TreeId};
use offshoot_device::BlockDevice;
use offshoot_vfs::{Code, Error, FileId, FileSystem, FileType, Parent, Result, Structure};

/// The most that a survey looks at, because a hostile volume may claim any amount.
const MAX_ENTRIES: usize = 20_000;
const MAX_DATA_BYTES: u64 = 128 << 20;
const MAX_ITEMS: usize = 300_000;
const MAX_RANGES: usize = 5000;
const MAX_XATTR_BYTES: usize = 16 << 20;

/// The results by the object and the operation: a digest, or the error.
pub(crate) type Survey = BTreeMap<String, Result<String>>;

/// Opens the volume and does everything with it.
pub(crate) fn survey(devices: Vec<Arc<dyn BlockDevice>>, is_degraded: bool) -> Survey {
    if is_degraded {
        survey_around_damage(devices.clone());
    }
    let mut seen = Survey::new();
    let reporter = |report: &offshoot_btrfs::VolumeReport| {
        let _ = report.to_string();
    };
    let options = EngineOptions {
        is_degraded,
        cache_bytes: 4 << 20,
        reporter: Some(Arc::new(reporter)),
        ..EngineOptions::default()
    };
    let volume = match BtrfsVolume::open(devices, &options) {
        Ok(volume) => volume,
        Err(error) => {
            seen.insert("open".to_owned(), Err(error));
            return seen;
        }
    };
    let _ = (volume.members().len(), volume.chunks().len());
    seen.insert("default".to_owned(), volume.default_subvolume().map(|id| id.to_string()));
    trees(&volume, &mut seen);
    let subvolumes = volume.subvolumes().collect::<Result<Vec<_>, _>>();
    let lost = subvolumes.iter().flatten().find_map(|one| one.path.as_ref().err());
    let listed = match (lost, &subvolumes) {
        (Some(error), _) | (None, Err(error)) => Err(again(error)),
        (None, Ok(all)) => Ok(format!("{all:?}")),
    };
    seen.insert("subvolumes".to_owned(), listed);
    let mut ids = vec![TreeId::FS];
    ids.extend(subvolumes.iter().flatten().map(|one| one.id).filter(|&id| id != TreeId::FS));
    for id in ids {
        match volume.filesystem(id) {
            Ok(fs) => SurveyWalk::new(&fs, id).run(&mut seen),
            Err(error) => drop(seen.insert(format!("subvolume {id}"), Err(error))),
        }
    }
    seen
}

/// Opens the volume to be read around damage, and reads all of its files. What is wrong does not
/// matter here, only that it ends.
pub(crate) fn survey_around_damage(devices: Vec<Arc<dyn BlockDevice>>) {
    let options = EngineOptions {
        is_degraded: true,
        cache_bytes: 4 << 20,
        rescue: Rescue::EVERYTHING,
        reporter: Some(Arc::new(|report| drop(report.to_string()))),
        ..EngineOptions::default()
    };
    let Ok(volume) = BtrfsVolume::open(devices, &options) else { return };
    let _ = volume.roots();
    if let Ok(files) = RecoveredFiles::open(&volume, TreeId::FS) {
        SurveyWalk::new(&*files, TreeId::FS).run(&mut Survey::new());
    }
}

/// A copy of an error, for a second entry.
fn again(error: &Error) -> Error {
    Error::corrupt(Structure::Tree, error.to_string())
}

/// Reads every item of every tree that the root tree names.
fn trees(volume: &Arc<BtrfsVolume>, seen: &mut Survey) {
    let mut ids = vec![TreeId::ROOT, TreeId::CHUNK];
    let mut budget = MAX_ITEMS;
    let listed = volume.for_each_item(volume.root_tree(), Key::MIN, |key, _| {
        if key.item_type == ItemType::ROOT_ITEM && ids.last() != Some(&TreeId(key.objectid)) {
            ids.push(TreeId(key.objectid));
        }
        ControlFlow::Continue(())
    });
    seen.insert("roots".to_owned(), listed.map(|()| format!("{ids:?}")));
    for id in ids {
        let mut sum = Digest::default();
        let read = volume.tree(id).and_then(|root| {
            volume.for_each_item(root, Key::MIN, |key, data| {
                sum.add(key.to_string().as_bytes());
                sum.add(data);
                budget = budget.saturating_sub(1);
                if budget == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            })
        });
        let read = match read {
            Ok(()) => Ok(sum.to_string()),
            // A subvolume that is deleted and not dropped yet.
            Err(Error::Posix { .. }) => Ok("none".to_owned()),
            Err(error) => Err(error),
        };
        seen.insert(format!("tree {id}"), read);
    }
}

/// A short digest of many bytes.
#[derive(Default)]
struct Digest(u64);

impl Digest {
    fn add(&mut self, bytes: &[u8]) {
        let sum = ChecksumType::Xxhash64.compute(bytes);
        let sum = u64::from_le_bytes(sum.bytes().try_into().expect("8 bytes"));
        self.0 = self.0.rotate_left(5).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ sum;
    }
}

impl std::fmt::Display for Digest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// A walk over all files of one subvolume and those nested in it.
struct SurveyWalk<'f> {
    fs: &'f dyn FileSystem,
    id: TreeId,
    entries: usize,
    data_bytes: u64,
}

impl<'f> SurveyWalk<'f> {
    fn new(fs: &'f dyn FileSystem, id: TreeId) -> Self {
        Self { fs, id, entries: 0, data_bytes: 0 }
    }

    fn run(&mut self, seen: &mut Survey) {
        let root = self.fs.root();
        let _ = self.fs.statfs();
        let mut stack = vec![(root, format!("{}:", self.id))];
        while let Some((dir, path)) = stack.pop() {
            seen.insert(format!("{path}/"), self.file(dir));
            let mut children = Vec::new();
            let read = self.fs.read_dir(dir, 0, &mut |entry| {
                children.push((entry.file, entry.file_type, entry.name.to_vec()));
                self.entries += 1;
                if self.entries > MAX_ENTRIES {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
            seen.insert(format!("{path}/ listed"), read.map(|()| children.len().to_string()));
            self.fs.prefetch(&children.iter().map(|child| child.0).collect::<Vec<_>>());
            for (file, kind, name) in children {
                let path = format!("{path}/{}", name.escape_ascii());
                let found = self.fs.lookup(dir, &name).map(|found| (found == file).to_string());
                seen.insert(format!("{path} looked up"), found);
                match self.stands(file, dir, &name, kind) {
                    Ok(true) => stack.push((file, path)),
                    Ok(false) => drop(seen.insert(path, self.file(file))),
                    Err(error) => drop(seen.insert(path, Err(error))),
                }
            }
        }
    }

    /// Whether `child` is a directory whose parent and name are those by which the walk reached it.
    /// That rules out cycles.
    fn stands(&self, child: FileId, dir: FileId, name: &[u8], kind: FileType) -> Result<bool> {
        if kind != FileType::Directory || self.entries > MAX_ENTRIES {
            return Ok(false);
        }
        let parent = self.fs.parent(child)?;
        Ok(parent == Some(Parent { dir, name: name.to_vec() }))
    }

    /// Everything that can be read of one file.
    fn file(&mut self, file: FileId) -> Result<String> {
        let attr = self.fs.attr(file)?;
        let mut sum = Digest::default();
        let (mut xattrs, mut bytes) = (Vec::new(), 0);
        self.fs.xattrs(file, &mut |name, value| {
            bytes += name.len() + value.len();
            xattrs.push((name.to_vec(), value.to_vec()));
            if bytes > MAX_XATTR_BYTES { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        xattrs.sort();
        for (name, value) in &xattrs {
            sum.add(name);
            sum.add(value);
            assert_eq!(*value, self.fs.xattr(file, name)?, "an xattr has one value");
        }
        match attr.file_type {
            FileType::Symlink => sum.add(&self.fs.read_link(file)?),
            FileType::Regular => self.data(file, attr.size, &mut sum)?,
            _ => {}
        }
        Ok(format!("{attr:?} {sum}"))
    }

    fn data(&mut self, file: FileId, size: u64, sum: &mut Digest) -> Result<()> {
        let mut after = 0;
        for _ in 0..MAX_RANGES {
            let Some(range) = self.fs.next_data(file, after)? else { break };
            assert!(range.start >= after && range.end > range.start, "{range:?} after {after}");
            assert!(range.end <= size, "{range:?} in a file of {size}");
            sum.add(format!("{range:?}").as_bytes());
            after = range.end;
        }
        let mut whole = Ok(());
        let mut end = 0;
        let read = self.fs.read_data(file, 0..size, &mut |offset, bytes| {
            assert!(offset >= end && offset + bytes.len() as u64 <= size, "a piece out of order");
            end = offset + bytes.len() as u64;
            self.data_bytes += bytes.len() as u64;
            sum.add(bytes);
            if self.data_bytes > MAX_DATA_BYTES {
                whole = Err(());
                return Err(Error::unsupported(Code::Unsupported, "the survey has seen enough"));
            }
            Ok(())
        });
        if whole.is_ok() {
            read?;
        }
        let mut buf = vec![0xaa; 9001];
        for offset in [0, 3000, size / 2, size.saturating_sub(4000)] {
            let count = self.fs.read(file, offset, &mut buf)?;
            assert_eq!(count as u64, size.saturating_sub(offset).min(9001), "a short read");
            sum.add(&buf[..count]);
        }
        Ok(())
    }
}
