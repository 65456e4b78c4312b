//! Images of all kinds that QEMU made and this crate writes: QEMU finds no error in them, and reads
//! the same bytes.

use std::path::Path;
use std::sync::Arc;

use offshoot_device::{
    BlockDevice, FileDevice, Qcow2Header, Qcow2Limits, Qcow2Options, open_qcow2_within,
};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::scratch_dir;

use super::failing::TINY;
use super::qemu::{qemu_img, qemu_io};

/// The properties of an image.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is an option of qemu-img by itself")]
struct ImageProperties {
    cluster_bits: u64,
    version: u64,
    has_subclusters: bool,
    has_zstd: bool,
    count_bits: u64,
    is_preallocated: bool,
    has_backing: bool,
    has_snapshot: bool,
    /// It is opened with small limits, so that few of its tables stay in memory.
    is_tiny: bool,
    disk_bytes: u64,
}

impl ImageProperties {
    fn any(random: &mut Random) -> Self {
        let version = if random.below(4) == 0 { 2 } else { 3 };
        let cluster_bits = [9, 10, 12, 14, 16, 16, 18, 21][small(random.below(8))];
        let has_subclusters = version == 3 && cluster_bits >= 14 && random.below(2) == 0;
        let has_backing = random.below(2) == 0;
        let count_bits = if version == 3 { 1 << random.below(7) } else { 16 };
        Self {
            cluster_bits,
            version,
            has_subclusters,
            has_zstd: version == 3 && random.below(2) == 0,
            count_bits,
            is_preallocated: !has_backing && random.below(3) == 0,
            has_backing,
            // A snapshot raises the counts of clusters that several compressed clusters share;
            // counts of fewer than 8 bits would overflow.
            has_snapshot: count_bits >= 8 && random.below(2) == 0,
            is_tiny: random.below(2) == 0,
            disk_bytes: (4 << 20) + random.below(5 << 20) / 512 * 512,
        }
    }

    fn make(&self, dir: &Path) {
        let _ = std::fs::remove_file(dir.join("top"));
        let version = if self.version == 2 { "0.10" } else { "1.1" };
        let cluster_bytes = 1u64 << self.cluster_bits;
        let mut options = format!("cluster_size={cluster_bytes},compat={version}");
        if self.version == 3 {
            options = format!("{options},refcount_bits={}", self.count_bits);
        }
        for (is_so, option) in [
            (self.has_subclusters, ",extended_l2=on"),
            (self.has_zstd, ",compression_type=zstd"),
            (self.is_preallocated, ",preallocation=metadata"),
        ] {
            options += if is_so { option } else { "" };
        }
        let base: &[&str] = if self.has_backing { &["-b", "base", "-F", "raw"] } else { &[] };
        let size = self.disk_bytes.to_string();
        let create = ["create", "-q", "-f", "qcow2", "-o", &options];
        qemu_img(dir, &[&create, base, &["top", &size]].concat());
    }

    /// Makes some requests with QEMU.
    fn qemu_writes(&self, path: &Path, random: &mut Random) {
        let mut commands = Vec::new();
        for _ in 0..12 {
            let len = (1 + random.below(160)) * 512;
            let at = random.below((self.disk_bytes - len) / 512) * 512;
            commands.push(match random.below(4) {
                0 => format!("write -z {at} {len}"),
                1 => format!("discard {at} {len}"),
                _ => format!("write -P {} {at} {len}", 1 + at % 250),
            });
        }
        qemu_io(path, "qcow2", &commands);
    }

    /// Writes compressed clusters. QEMU can do that only where no cluster is stored yet.
    fn qemu_packs(&self, path: &Path) {
        if self.is_preallocated {
            return;
        }
        let bytes = 1u64 << self.cluster_bits;
        let step = small((self.disk_bytes >> self.cluster_bits).div_ceil(40)).max(2);
        let whole = (0..self.disk_bytes >> self.cluster_bits).step_by(step);
        let pack = |at: u64| format!("write -c -P {} {} {bytes}", 1 + at % 250, at * bytes);
        qemu_io(path, "qcow2", &whole.map(pack).collect::<Vec<_>>());
    }
}

fn small(number: u64) -> usize {
    usize::try_from(number).expect("small")
}

fn opened(
    dir: &Path,
    kind: &ImageProperties,
    is_writable: bool,
    snapshot: Option<&str>,
) -> Arc<dyn BlockDevice> {
    let path = dir.join("top");
    let file = if is_writable {
        FileDevice::open_writable(&path).map(FileDevice::growing)
    } else {
        FileDevice::open(&path)
    };
    let file = Arc::new(file.expect("it opens"));
    let header = Qcow2Header::read(&*file).expect("a header");
    let backing: Option<Arc<dyn BlockDevice>> = header
        .backing
        .as_ref()
        .map(|name| Arc::new(FileDevice::open(&dir.join(name)).expect("it opens")) as _);
    let snapshot = snapshot.map(|name| header.snapshot(name).expect("it is there").clone());
    let options = Qcow2Options { is_writable, backing, snapshot };
    let limits = if kind.is_tiny { TINY } else { Qcow2Limits::default() };
    open_qcow2_within(file, &header, options, limits).expect("it opens")
}

/// Makes requests to the part of `disk` that begins at byte `start`, and compares it with `model`.
fn requests(disk: &dyn BlockDevice, start: u64, model: &mut [u8], random: &mut Random, what: &str) {
    for _ in 0..60 {
        let most = [600, 5000, 70_000, 700_000][small(random.below(4))].min(model.len() as u64);
        let len = random.below(most);
        let at = random.below(model.len() as u64 - len);
        let range = small(at)..small(at + len);
        match random.below(10) {
            0 => disk.flush().expect("a flush"),
            1 => match disk.discard(start + at, len) {
                Ok(()) => {
                    let mut found = vec![0; range.len()];
                    disk.read_at(start + at, &mut found).expect("it is read");
                    let is_possible = |(new, old): (&u8, &u8)| *new == 0 || new == old;
                    assert!(found.iter().zip(&model[range.clone()]).all(is_possible), "{what}");
                    model[range].copy_from_slice(&found);
                }
                Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::Unsupported, "{what}"),
            },
            2..=4 => {
                let mut found = vec![1; range.len()];
                disk.read_at(start + at, &mut found).expect("it is read");
                let differs = found.iter().zip(&model[range]).position(|(new, old)| new != old);
                assert_eq!(differs, None, "{what}: read {at}+{len} of the part at {start}");
            }
            _ => {
                let bytes = random.bytes(range.len());
                disk.write_at(start + at, &bytes).expect("a write");
                model[range].copy_from_slice(&bytes);
            }
        }
    }
}

/// Two threads write to parts of the disk that share a cluster.
#[test]
fn images_of_every_kind_are_written_as_qemu_has_them() {
    if !judges::are_present() {
        return;
    }
    let dir = scratch_dir();
    let (dir, seed) = (dir.path(), seed_of_run());
    let path = dir.join("top");
    let mut random = Random::new(seed);
    for case in 0..24 {
        let kind = ImageProperties::any(&mut random);
        let what = &format!("OFFSHOOT_SEED={seed}, case {case}: {kind:?}");
        let base_bytes = small(kind.disk_bytes) - 300_000 + small(random.below(600)) * 1024;
        std::fs::write(dir.join("base"), random.bytes(base_bytes)).expect("a file");
        kind.make(dir);
        kind.qemu_packs(&path);
        kind.qemu_writes(&path, &mut random);
        if kind.has_snapshot {
            qemu_img(dir, &["snapshot", "-c", "kept", "top"]);
            qemu_img(dir, &["convert", "-O", "raw", "top", "kept"]);
        }
        for _ in 0..2 {
            kind.qemu_writes(&path, &mut random);
            qemu_img(dir, &["convert", "-O", "raw", "top", "now"]);
            let mut model = std::fs::read(dir.join("now")).expect("a file");
            let disk = opened(dir, &kind, true, None);
            let half = model.len() / 2 - 777;
            let (first, second) = model.split_at_mut(half);
            let mut randoms = [Random::new(random.number()), Random::new(random.number())];
            let [one, other] = &mut randoms;
            std::thread::scope(|scope| {
                scope.spawn(|| requests(&*disk, 0, first, one, what));
                requests(&*disk, half as u64, second, other, what);
            });
            drop(disk);
            // `qemu-img check` also fails for leaks.
            qemu_img(dir, &["check", "top"]);
            qemu_img(dir, &["convert", "-O", "raw", "top", "now"]);
            let now = std::fs::read(dir.join("now")).expect("a file");
            let differs = now.iter().zip(&model).position(|(new, old)| new != old);
            assert_eq!((now.len(), differs), (model.len(), None), "{what}");
            let mut found = vec![1; model.len()];
            opened(dir, &kind, false, None).read_at(0, &mut found).expect("it is read");
            assert!(found == model, "{what}");
            if kind.has_snapshot {
                qemu_img(dir, &["convert", "-l", "kept", "-O", "raw", "top", "now"]);
                let kept = std::fs::read(dir.join("kept")).expect("a file");
                assert!(std::fs::read(dir.join("now")).expect("a file") == kept, "{what}");
                let disk = opened(dir, &kind, false, Some("kept"));
                disk.read_at(0, &mut found).expect("it is read");
                assert!(found == kept, "{what}");
            }
        }
    }
}
