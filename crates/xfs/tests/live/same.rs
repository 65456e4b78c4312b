//! The same calls make the same bytes, however much of the volume is in memory.

use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_vfs::XattrMode;
use offshoot_xfs::{XfsMkfsOptions, mkfs_xfs};
use uuid::Uuid;

use super::*;

const BYTES: u64 = 400 << 20;

/// What is written home when an eighth of the log holds no more: several times.
const FILES: u64 = 30_000;

/// Makes a volume, and files, links and attributes in it, removes some, and makes others: all on
/// one thread.
fn written(cache_bytes: u64, seed: u64) -> Arc<dyn BlockDevice> {
    let device: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(BYTES));
    let made = XfsMkfsOptions { seed: 3, ..XfsMkfsOptions::new(Uuid::from_u128(7), AT) };
    mkfs_xfs(&*device, &made).unwrap();
    let options = XfsOptions {
        cache_bytes,
        sync_interval: None,
        is_reproducible: true,
        proves_commits: false,
        ..XfsOptions::default()
    };
    let opened = WrittenXfs::over(XfsVolume::open_writable(device.clone(), &options).unwrap());
    let (files, mut random) = (&opened.files, Random::new(seed));
    let mut dirs = vec![opened.root()];
    for number in 0..FILES {
        let at = usize::try_from(random.below(dirs.len() as u64)).unwrap();
        let name = format!("{number}-{}", "n".repeat(usize::try_from(random.below(60)).unwrap()));
        let place = EntryPlace { dir: dirs[at], name: name.as_bytes() };
        if random.below(20) == 0 {
            dirs.push(files.mkdir(place, &NEW).unwrap());
            continue;
        }
        let file = files.create(place, &NEW).unwrap();
        let len = usize::try_from(random.below(9000)).unwrap();
        files.write(file, 0, &random.bytes(len), AT).unwrap();
        let value = vec![7; usize::try_from(random.below(600)).unwrap()];
        files.set_xattr(file, b"user.a", &value, XattrMode::Set, AT).unwrap();
        match random.below(6) {
            0 => files.unlink(place, AT).unwrap(),
            1 => {
                let other = format!("{number}-linked");
                let dir = dirs[usize::try_from(random.below(dirs.len() as u64)).unwrap()];
                files.link(file, EntryPlace { dir, name: other.as_bytes() }, AT).unwrap();
            }
            _ => {}
        }
    }
    opened.shut_down();
    device
}

/// What a transaction finds in the cache is what it would find on the device: the log says it, too.
#[test]
fn the_size_of_the_cache_makes_no_difference() {
    let seed = seed_of_run();
    let first = written(64 << 20, seed);
    for cache_bytes in [256 << 10, 4 << 20] {
        let other = written(cache_bytes, seed);
        let (mut one, mut two) = (vec![0; 1 << 20], vec![0; 1 << 20]);
        for at in (0..BYTES).step_by(1 << 20) {
            first.read_at(at, &mut one).unwrap();
            other.read_at(at, &mut two).unwrap();
            let differs = one.iter().zip(&two).position(|(one, two)| one != two);
            let differs = differs.map(|offset| at + offset as u64);
            assert_eq!(differs, None, "a cache of {cache_bytes}, seed {seed:#x}");
        }
    }
}
