//! Directories and attributes of every form, damaged at random, each block with a right checksum.
//! Changes of them fail or succeed, but end; errors say which block or inode they are about; what
//! was committed goes home, so it is what its block should be; and what is sound is written on.

use std::sync::Arc;

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_vfs::{Code, DirEntry, Error};
use offshoot_xfs_format::attr::XattrFlags;
use offshoot_xfs_format::attr::leaf::XattrLeaf;
use offshoot_xfs_format::dir::{free_start, leaf_start};
use offshoot_xfs_format::identity::XfsIdentity;
use offshoot_xfs_format::inode::{INODE_CRC, XfsInodeCore};
use offshoot_xfs_format::{XfsGeometry, csum};

use super::*;
use crate::attr::change::{OwnedXattr, XattrChange, find_xattr};
use crate::defer::change_xattr;
use crate::inode::file_id;
use crate::test_volumes::engine_on;

const BLOCK: usize = 1024;

/// The sound directory.
const SOUND: usize = 0;

/// The blocks that a change of an attribute may take.
const XATTR_BLOCKS: u64 = 300;

/// What is damaged.
#[derive(Clone, Copy, Debug)]
struct DamagedUnit {
    at: u64,
    len: usize,
    /// `None` for an inode.
    identity: Option<XfsIdentity>,
}

impl DamagedUnit {
    /// Whether it says which blocks a fork has. Wrong ones cannot be freed, which ends writing.
    fn has_extents(&self) -> bool {
        self.identity.is_none_or(|identity| identity == XfsIdentity::LONG_BLOCK)
    }

    fn seal(&self, bytes: &mut [u8]) {
        match self.identity {
            Some(identity) => {
                let lsn = identity.lsn_of(bytes).unwrap();
                identity.seal(bytes, lsn);
            }
            None => csum::store(bytes, INODE_CRC),
        }
    }
}

struct DamageRun {
    volume: NamedVolume,
    xattr_files: Vec<Ino>,
    image: MemoryDevice,
    units: Vec<DamagedUnit>,
    geometry: XfsGeometry,
}

fn name(number: usize) -> Vec<u8> {
    format!("the name with number {number}").into_bytes()
}

fn xattr(number: usize, len: usize) -> OwnedXattr {
    let name = format!("attribute {number}").into_bytes();
    OwnedXattr { namespace: XattrFlags::TRUSTED, name, value: vec![7; len] }
}

impl DamageRun {
    /// A volume with all forms.
    fn make() -> Option<Self> {
        let options = "--unsupported -b size=1024";
        let mut volume = NamedVolume::make(64, options, 13, seed_of_run())?;
        let engine = engine(&volume.disk);
        let geometry = engine.geometry().clone();
        for (directory, names) in [(SOUND, 400), (1, 4), (2, 50), (3, 250), (5, 900)] {
            (0..names).for_each(|number| volume.add(&engine, directory, &name(number)));
        }
        // Two directories of one group take blocks in turn, so their extents are many.
        let group = |ino: Ino| geometry.locate(ino).unwrap().0;
        let groups: Vec<_> =
            volume.directories.iter().map(|directory| group(directory.ino)).collect();
        let pair = (6..13).find_map(|one| {
            (one + 1..13).find(|other| groups[*other] == groups[one]).map(|other| [one, other])
        });
        for number in 0..900 {
            pair.unwrap().into_iter().for_each(|index| volume.add(&engine, index, &name(number)));
        }
        let xattr_files = vec![volume.files[3].ino, volume.files[4].ino, volume.files[8].ino];
        for (&file, (count, len)) in xattr_files.iter().zip([(3, 5), (6, 80), (90, 60)]) {
            for number in 0..count {
                let len = if number % 30 == 7 { 4000 } else { len };
                Self::set(&engine, &volume, file, number, len).unwrap();
            }
        }
        engine.unmount().unwrap();
        let device = volume.disk.device();
        let mut bytes = vec![0; usize::try_from(device.size_bytes()).unwrap()];
        device.read_at(0, &mut bytes).unwrap();
        let mut units = units(&geometry, &bytes);
        let inodes = volume.directories.iter().skip(1).map(|directory| directory.ino);
        let inodes = inodes.chain(xattr_files.iter().copied());
        units.extend(inodes.map(|ino| DamagedUnit {
            at: geometry.inode_offset(ino).unwrap(),
            len: geometry.inode_size(),
            identity: None,
        }));
        let sound = geometry_owner(volume.directories[SOUND].ino);
        units.retain(|unit| {
            let owner = unit.identity.and_then(|identity| identity.owner);
            let at = usize::try_from(unit.at).unwrap();
            owner.is_none_or(|(field, _)| bytes[at + field..at + field + 8] != sound)
        });
        let image = MemoryDevice::new(bytes);
        Some(Self { volume, xattr_files, image, units, geometry })
    }

    fn set(
        engine: &XfsTransactions,
        volume: &NamedVolume,
        file: Ino,
        number: usize,
        len: usize,
    ) -> Result<()> {
        let t = engine.begin(Kind::ChangeAttribute, XATTR_BLOCKS)?;
        change_xattr(t, &volume.ids, XattrChange::set(file, xattr(number, len)))
    }

    fn below(&mut self, end: usize) -> usize {
        self.volume.below(end)
    }

    /// Damages a unit. Returns whether it has extents.
    fn damage(&mut self, device: &dyn BlockDevice) -> bool {
        let which = self.below(self.units.len());
        let unit = self.units[which];
        let mut bytes = vec![0; unit.len];
        device.read_at(unit.at, &mut bytes).unwrap();
        let from = if unit.identity.is_some() { 0 } else { XfsInodeCore::len(&self.geometry) };
        match self.below(4) {
            0 => {
                for _ in 0..=self.below(4) {
                    let at = from + self.below(bytes.len() - from);
                    bytes[at] = u8::try_from(self.below(256)).unwrap();
                }
            }
            1 => {
                for _ in 0..=self.below(3) {
                    // A link, or a field or an entry near the front.
                    let at = from + [0, 4, 56, 60, 64, 68, 72, 76][self.below(8)];
                    bytes[at..at + 4].copy_from_slice(&self.number().to_be_bytes());
                }
            }
            2 => {
                let at = from + self.below((bytes.len() - from) / 4) * 4;
                bytes[at..at + 4].copy_from_slice(&self.number().to_be_bytes());
            }
            _ => {
                // The contents of another unit of its kind.
                let same =
                    |other: &&DamagedUnit| other.identity == unit.identity && other.len == unit.len;
                let others: Vec<_> = self.units.iter().filter(same).copied().collect();
                let other = others[self.below(others.len())];
                let mut contents = vec![0; unit.len];
                device.read_at(other.at, &mut contents).unwrap();
                let from = if from > 0 { from } else { 64 };
                bytes[from..].copy_from_slice(&contents[from..]);
            }
        }
        unit.seal(&mut bytes);
        device.write_at(unit.at, &bytes).unwrap();
        unit.has_extents()
    }

    /// A number that may be one of a block in a fork, or a count.
    fn number(&mut self) -> u32 {
        let unit = 1 << self.geometry.dir_block_log;
        let start = match self.below(4) {
            0 => leaf_start(&self.geometry).0,
            1 => free_start(&self.geometry).0,
            2 => 0,
            _ => return u32::try_from(self.volume.random.below(1 << 32)).unwrap(),
        };
        u32::try_from(start).unwrap() + u32::try_from(self.below(12)).unwrap() * unit
    }

    /// Our reader finds all names of the sound directory, with the one that was added last.
    fn assert_sound_is_whole(&self, device: &Arc<dyn BlockDevice>, round: usize) {
        let sound = &self.volume.directories[SOUND];
        let reader = XfsVolume::open(device.clone(), &XfsOptions::default()).unwrap();
        let mut found = std::collections::BTreeSet::new();
        let mut visit = |entry: DirEntry<'_>| {
            found.insert(entry.name.to_vec());
            ControlFlow::Continue(())
        };
        reader.read_dir(file_id(sound.ino), 0, &mut visit).unwrap();
        assert!(found.remove(&b"one more"[..]), "round {round}");
        assert!(found.iter().eq(sound.names.keys()), "round {round}");
    }

    /// A random change of a name or of an attribute.
    fn change(&mut self, engine: &XfsTransactions) -> Result<()> {
        let number = self.below(1000);
        let action = self.below(5);
        if self.below(3) == 0 {
            let which = self.below(3);
            let file = self.xattr_files[which];
            let number = number % 100;
            if action < 3 {
                let len = [5, 70, 250, 3000][self.below(4)];
                return Self::set(engine, &self.volume, file, number, len);
            }
            let t = engine.begin(Kind::ChangeAttribute, XATTR_BLOCKS)?;
            return change_xattr(t, &self.volume.ids, XattrChange::remove(file, xattr(number, 0)));
        }
        let which = 1 + self.below(12);
        let dir = self.volume.directories[which].ino;
        let target = (self.volume.files[3].ino, self.volume.files[3].file_type);
        let mut t = engine.begin(Kind::Rename, most_blocks_to_add(engine))?;
        let work = match action {
            0 | 1 => add_name(&mut t, dir, &name(1000 + number), target),
            2 => replace_name(&mut t, dir, &name(number), target),
            _ => remove_name(&mut t, dir, &name(number)),
        }?;
        assert!(t.held_buffers().len() < 2000);
        let mut chain = DeferredChain::new(&self.volume.ids);
        chain.defer(&mut t, work);
        chain.finish(t, &[])
    }
}

fn geometry_owner(ino: Ino) -> [u8; 8] {
    ino.0.to_be_bytes()
}

/// The blocks of directories, of attributes, and of trees of extents.
fn units(geometry: &XfsGeometry, image: &[u8]) -> Vec<DamagedUnit> {
    let unit = |(number, block): (usize, &[u8])| {
        let identity = XfsIdentity::of_magic(geometry, block)?;
        let kinds = [XfsIdentity::DIRECTORY, XfsIdentity::NODE, XfsIdentity::LONG_BLOCK];
        let at = number * BLOCK;
        let is_right = |len: &usize| {
            image.get(at..at + len).is_some_and(|bytes| csum::is_right(bytes, identity.crc))
        };
        let len = [BLOCK, 4 * BLOCK].into_iter().find(is_right)?;
        kinds.contains(&identity).then_some(DamagedUnit {
            at: at as u64,
            len,
            identity: Some(identity),
        })
    };
    image.chunks(BLOCK).enumerate().filter_map(unit).collect()
}

/// Whether an error says what it is about, if it is one about the volume.
fn says_where(error: &Error) -> bool {
    let text = error.to_string();
    matches!(error, Error::Posix { .. })
        || error.code() == Code::Unsupported
        || ["block ", "at byte ", "inode ", "file "].iter().any(|word| text.contains(word))
}

#[test]
fn changes_of_damaged_directories_and_attributes_end() {
    let Some(mut run) = DamageRun::make() else { return };
    let kinds: std::collections::BTreeSet<_> = run
        .units
        .iter()
        .map(|unit| (unit.len, unit.identity.map(|identity| identity.crc)))
        .collect();
    // Two kinds of blocks of directories, those of attributes and of trees of extents, and inodes.
    assert!(kinds.len() >= 5, "{kinds:?}");
    let (mut done, mut failed, mut stopped) = (0, 0, 0);
    for round in 0..120 {
        let device: Arc<dyn BlockDevice> = Arc::new(run.image.snapshot());
        let mut has_extents = false;
        for _ in 0..=run.below(3) {
            has_extents |= run.damage(&*device);
        }
        let engine = engine_on(device.clone());
        // Without the proof of all blocks at each commit, as in release builds, the outcome is the
        // same.
        engine.prove_all(round % 2 == 0);
        for _ in 0..50 {
            match run.change(&engine) {
                Ok(()) => done += 1,
                Err(error) => {
                    failed += 1;
                    assert!(says_where(&error), "round {round}: {error}");
                }
            }
        }
        // The sound directory, unless what was to be freed cannot be.
        let sound = run.volume.directories[SOUND].names.clone();
        let added = run.volume.try_change(&engine, SOUND, b"one more", XfsNameChange::Add(4));
        run.volume.directories[SOUND].names = sound;
        let ended = added.and_then(|()| engine.unmount());
        match ended {
            Ok(()) => run.assert_sound_is_whole(&device, round),
            Err(_) if has_extents => stopped += 1,
            Err(error) => panic!("round {round}: {error}"),
        }
    }
    assert!(done > 1000 && failed > 100, "{done} done, {failed} failed, {stopped} stopped");
    // Most damage is found before a commit.
    assert!(stopped < 40, "{stopped} of 120 rounds ended writing");
}

/// A leaf of attributes has one inside the name of another. The removal of the inner one would
/// spoil the name. It fails, and other files are written on.
#[test]
fn an_attribute_inside_the_name_of_another_is_not_removed() {
    let Some(mut volume) = NamedVolume::make(64, "--unsupported -b size=1024", 2, seed_of_run())
    else {
        return;
    };
    let engine = engine(&volume.disk);
    let geometry = engine.geometry().clone();
    let file = volume.files[3].ino;
    // The name has the header of a name of 5 bytes with a value of 257 in it, at a place for one.
    let outer = OwnedXattr {
        namespace: XattrFlags::TRUSTED,
        name: b"a\x01\x01\x05inner of the outer".to_vec(),
        value: vec![7; 400],
    };
    let inner =
        OwnedXattr { namespace: XattrFlags::TRUSTED, name: b"inner".to_vec(), value: vec![8; 9] };
    for xattr in [&outer, &inner] {
        let t = engine.begin(Kind::ChangeAttribute, XATTR_BLOCKS).unwrap();
        change_xattr(t, &volume.ids, XattrChange::set(file, xattr.clone())).unwrap();
    }
    engine.unmount().unwrap();
    let device = volume.disk.device();
    let mut image = vec![0; usize::try_from(device.size_bytes()).unwrap()];
    device.read_at(0, &mut image).unwrap();
    let owner = geometry_owner(file);
    let unit = units(&geometry, &image).into_iter().find(|unit| {
        let at = usize::try_from(unit.at).unwrap();
        let field = unit.identity.and_then(|identity| identity.owner).unwrap().0;
        image[at + field..at + field + 8] == owner
    });
    let unit = unit.unwrap();
    let at = usize::try_from(unit.at).unwrap();
    let mut bytes = image[at..at + unit.len].to_vec();
    let leaf = XattrLeaf::view(&geometry, &bytes).unwrap();
    let number = |xattr: &OwnedXattr| leaf.find(xattr.namespace, &xattr.name).unwrap().0;
    let place_of_outer = leaf.hashes[number(&outer)].nameidx.get();
    let header = DaKind::AttrLeaf.header_len(&geometry);
    let entry = header + number(&inner) * 8 + 4;
    bytes[entry..entry + 2].copy_from_slice(&(place_of_outer + 4).to_be_bytes());
    unit.seal(&mut bytes);
    for proves_all in [true, false] {
        let damaged: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::over(device.clone()));
        damaged.write_at(unit.at, &bytes).unwrap();
        let engine = engine_on(damaged);
        engine.prove_all(proves_all);
        let mut t = engine.begin(Kind::ChangeAttribute, XATTR_BLOCKS).unwrap();
        let found = find_xattr(&mut t, file, inner.namespace, &inner.name).unwrap();
        assert_eq!(found.map(|value| value.len()), Some(257));
        drop(t);
        for change in [
            XattrChange::remove(file, inner.clone()),
            XattrChange::set(file, OwnedXattr { value: vec![9; 30], ..inner.clone() }),
        ] {
            let t = engine.begin(Kind::ChangeAttribute, XATTR_BLOCKS).unwrap();
            let error = change_xattr(t, &volume.ids, change).unwrap_err();
            assert!(matches!(error, Error::Corrupt(_)) && says_where(&error), "{error}");
        }
        volume.add(&engine, 1, b"a name elsewhere");
        volume.directories[1].names.clear();
        engine.unmount().unwrap();
    }
}
