//! Kinds of damage to a volume of XFS.

#![allow(dead_code, reason = "each of the programs that share this calls a part of it")]

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use offshoot_device::BlockDevice;
use offshoot_testkit::random::Random;
use offshoot_vfs::Malformed;
use offshoot_xfs_format::log::ends::{self, read_record};
use offshoot_xfs_format::log::{XfsLogRecord, XfsLogRing};
use offshoot_xfs_format::superblock::{CRC, XfsSuperblock};
use offshoot_xfs_format::{Lsn, XfsGeometry, csum};
use uuid::Uuid;

use crate::image::{Patched, SparseImage};
use crate::units::{SealedUnit, units};

const BASIC_BLOCK: usize = 512;

/// A volume to be damaged.
pub(crate) struct XfsDamageTarget {
    image: Arc<SparseImage>,
    geometry: XfsGeometry,
    units: Vec<SealedUnit>,
    ring: XfsLogRing,
    /// The bytes of the log on the device.
    log: Range<u64>,
    /// The records that a replay reads.
    records: Vec<Lsn>,
}

impl XfsDamageTarget {
    /// The volume in the image at `path`, which is sound.
    pub(crate) fn of(path: &Path) -> Self {
        let image = Arc::new(SparseImage::read(path).expect("an image"));
        let sound = Patched::new(&image);
        let mut sector = vec![0; 4096];
        sound.read_at(0, &mut sector).expect("a first sector");
        let XfsSuperblock { fields, geometry } = XfsSuperblock::parse(&sector).expect("a volume");
        let ring = XfsLogRing::of(&geometry).expect("a log");
        let start = geometry.place_of(geometry.log_start).expect("a log inside").bytes();
        let log = start..start + (u64::from(geometry.log_blocks) << geometry.block_log);
        let units = units(&sound, &geometry);
        let mut target = Self { image, geometry, units, ring, log, records: Vec::new() };
        target.records = target.records(Uuid::from_bytes(fields.uuid));
        target
    }

    fn records(&self, uuid: Uuid) -> Vec<Lsn> {
        let ends = ends::find(self.ring, uuid, &mut self.log_reader()).expect("a sound log");
        let (mut at, mut records) = (ends.tail, Vec::new());
        while at != ends.head {
            let (record, _) = self.record(at);
            records.push(at);
            at = self.ring.advance(at, record.block_count());
        }
        records
    }

    fn log_reader(&self) -> impl FnMut(u32, &mut [u8]) -> Result<(), Malformed> + use<> {
        let (sound, start) = (self.sound(), self.log.start);
        move |block, bytes| {
            let at = start + u64::from(block) * BASIC_BLOCK as u64;
            sound.read_at(at, bytes).expect("a sound image");
            Ok(())
        }
    }

    /// A record with its blocks, still packed.
    fn record(&self, at: Lsn) -> (XfsLogRecord, Vec<u8>) {
        let mut blocks = Vec::new();
        let read = read_record(self.ring, at, &mut self.log_reader(), &mut blocks);
        let (record, _) = read.expect("a sound image").expect("a sound log");
        (record, blocks)
    }

    /// The image as it is.
    pub(crate) fn sound(&self) -> Patched {
        Patched::new(&self.image)
    }

    /// The image with one random damage, and the kind of it.
    pub(crate) fn damaged(&self, random: &mut Random) -> (Patched, &'static str) {
        let mut image = self.sound();
        let kind = match random.below(20) {
            0 => self.truncate(random, &mut image),
            1..3 => self.garbage(random, &mut image),
            3..6 => self.superblock(random, &mut image),
            6..9 => self.flip(random, &mut image),
            9..13 if self.records.len() > 1 => self.lie_in_log(random, &mut image),
            _ => self.lie(random, &mut image),
        };
        (image, kind)
    }

    fn truncate(&self, random: &mut Random, image: &mut Patched) -> &'static str {
        let used = self.image.used();
        image.truncate(used[index(random, used.len())] + random.below(4096));
        "truncated"
    }

    /// Writes noise or zeros over a page that is in use.
    fn garbage(&self, random: &mut Random, image: &mut Patched) -> &'static str {
        let used = self.image.used();
        let len = 1 + index(random, 4096);
        let noise = if random.below(2) == 0 { vec![0; len] } else { random.bytes(len) };
        image.write(used[index(random, used.len())], &noise);
        "garbage"
    }

    /// Changes fields of the first superblock, and of all others at times. Their checksums are
    /// right.
    fn superblock(&self, random: &mut Random, image: &mut Patched) -> &'static str {
        /// The end of the fields that the features of the volumes use.
        const FIELDS: usize = 272;
        let changes = random.number();
        let groups = if random.below(3) == 0 { self.geometry.ag_count } else { 1 };
        for group in 0..u64::from(groups) {
            let at = group * (u64::from(self.geometry.ag_blocks) << self.geometry.block_log);
            let mut bytes = self.read(at, self.geometry.sector_size());
            let mut random = Random::new(changes);
            for _ in 0..=random.below(3) {
                scramble(&mut random, &mut bytes[4..FIELDS]);
            }
            self.seal(&mut bytes, CRC);
            image.write(at, &bytes);
        }
        "superblock"
    }

    /// Changes bytes of metadata.
    fn flip(&self, random: &mut Random, image: &mut Patched) -> &'static str {
        let unit = self.unit(random);
        let mut bytes = self.read(unit.at, unit.len);
        (0..=random.below(3)).for_each(|_| scramble(random, &mut bytes));
        image.write(unit.at, &bytes);
        "flipped"
    }

    /// Changes some metadata, and makes the checksums right.
    fn lie(&self, random: &mut Random, image: &mut Patched) -> &'static str {
        for _ in 0..=random.below(3) {
            let unit = self.unit(random);
            let mut bytes = self.read(unit.at, unit.len);
            match random.below(6) {
                0 => self.splice(random, unit, &mut bytes),
                1 => self.redirect(random, &mut bytes),
                // Headers are where most fields are.
                2 | 3 => scramble(random, &mut bytes[..100]),
                _ => (0..=random.below(3)).for_each(|_| scramble(random, &mut bytes)),
            }
            self.seal(&mut bytes, unit.crc);
            image.write(unit.at, &bytes);
        }
        "lies"
    }

    /// Gives a unit the contents of another one of its kind, behind the header.
    fn splice(&self, random: &mut Random, unit: SealedUnit, bytes: &mut [u8]) {
        let is_alike = |other: &&SealedUnit| (other.len, other.crc) == (unit.len, unit.crc);
        let alike: Vec<_> = self.units.iter().filter(is_alike).collect();
        let other = alike[index(random, alike.len())];
        let from = [56, 64, 176][index(random, 3)].min(bytes.len());
        bytes[from..].copy_from_slice(&self.read(other.at, other.len)[from..]);
    }

    /// Puts the place of another unit somewhere, in the forms that pointers have.
    fn redirect(&self, random: &mut Random, bytes: &mut [u8]) {
        let target = self.unit(random).at >> self.geometry.block_log;
        let (group, block) = (
            target / u64::from(self.geometry.ag_blocks),
            target % u64::from(self.geometry.ag_blocks),
        );
        let whole = (group << self.geometry.ag_block_log | block).to_be_bytes();
        let inode = (target << self.geometry.inodes_per_block_log()).to_be_bytes();
        let forms: [&[u8]; 3] = [&whole, &whole[4..], &inode];
        let form = forms[index(random, 3)];
        let at = index(random, bytes.len() / 4) * 4;
        let len = form.len().min(bytes.len() - at);
        bytes[at..at + len].copy_from_slice(&form[..len]);
    }

    /// Changes records that a replay reads. Most get right checksums.
    fn lie_in_log(&self, random: &mut Random, image: &mut Patched) -> &'static str {
        for _ in 0..=random.below(2) {
            let at = self.records[index(random, self.records.len())];
            let (mut record, mut blocks) = self.record(at);
            record.unpack(&mut blocks).expect("a sound record");
            let headers = record.header_blocks() as usize * BASIC_BLOCK;
            // Most of the sense is at the start.
            let most = if random.below(2) == 0 { 600 } else { blocks.len() };
            let end = most.min(blocks.len() - headers) + headers;
            (0..=random.below(3)).for_each(|_| scramble(random, &mut blocks[headers..end]));
            if random.below(8) == 0 {
                record.ops = u32::try_from(random.below(1 << 16)).expect("small");
            }
            if random.below(8) > 0 {
                record.seal(self.ring, &mut blocks).expect("a sound record");
            }
            for (block, index) in blocks.chunks(BASIC_BLOCK).zip(0..) {
                let at = self.ring.advance(at, index).block();
                image.write(self.log.start + u64::from(at) * BASIC_BLOCK as u64, block);
            }
        }
        "lies in the log"
    }

    fn unit(&self, random: &mut Random) -> SealedUnit {
        self.units[index(random, self.units.len())]
    }

    fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.sound().read_at(at, &mut bytes).expect("a sound image");
        bytes
    }

    fn seal(&self, bytes: &mut [u8], crc: usize) {
        if self.geometry.has_checksums() {
            csum::store(bytes, crc);
        }
    }
}

fn index(random: &mut Random, len: usize) -> usize {
    usize::try_from(random.below(len as u64)).expect("below a length")
}

/// Changes a few bytes: a bit, a byte, or a field that gets a special value or one near it.
fn scramble(random: &mut Random, bytes: &mut [u8]) {
    const SPECIAL: [u64; 10] = [0, 1, 2, 64, 256, 4096, 1 << 21, 1 << 31, 1 << 63, u64::MAX];
    if bytes.is_empty() {
        return;
    }
    let at = index(random, bytes.len());
    match random.below(4) {
        0 => bytes[at] ^= 1 << random.below(8),
        1 => bytes[at] = random.bytes(1)[0],
        _ => {
            let value = SPECIAL[index(random, SPECIAL.len())].wrapping_sub(random.below(3));
            let width = [1, 2, 4, 8][index(random, 4)];
            let at = at / width * width;
            let width = width.min(bytes.len() - at);
            bytes[at..at + width].copy_from_slice(&value.to_be_bytes()[8 - width..]);
        }
    }
}
