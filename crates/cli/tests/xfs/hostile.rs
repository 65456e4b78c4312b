//! Every verb that reads, on damaged volumes: it ends in time, with a documented exit code and a
//! word about what is wrong. The sweep of the engine goes deeper; this one is about the program.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use offshoot_testkit::random::{Random, seed_of_run};
use offshoot_testkit::xfs::judges;
use offshoot_xfs_format::csum;
use offshoot_xfs_format::superblock::CRC;

use super::{FewFiles, lines};

/// How long a verb may take, on a slow machine.
const LIMIT: Duration = Duration::from_secs(60);

/// How many damages are tried.
const CASES: u64 = 40;

const SECTOR: usize = 512;

/// The fields of a superblock that the features of the volume use, in bytes.
const SUPERBLOCK: usize = 272;

fn index(random: &mut Random, end: usize) -> usize {
    usize::try_from(random.below(end as u64)).expect("below a length")
}

#[test]
fn damaged_volumes_end_every_verb_in_order() {
    let Some(judges) = judges::require() else { return };
    let few = FewFiles::new(&judges);
    let disk = &few.filled.disk;
    let image = File::options().read(true).write(true).open(few.dir().join("v.img"));
    let image = image.expect("an image");
    let seed = seed_of_run();
    let mut random = Random::new(seed);
    let used: Vec<u64> = {
        let mut sector = [0; SECTOR];
        let [start, group, bits] =
            ["logstart", "agblocks", "agblklog"].map(|name| disk.field(&["sb 0"], name));
        let log = ((start >> bits) * group + start % (1 << bits)) * 4096;
        let starts = (0..4 << 20).chain(log..log + (64 << 10)).step_by(SECTOR);
        let is_used = |at: &u64| {
            image.read_exact_at(&mut sector, *at).expect("a read");
            sector.iter().any(|&byte| byte != 0)
        };
        starts.filter(is_used).collect()
    };
    let ino = few.does("stat -c %i v.img:/dir/big");
    let dump = format!("dump inode v.img {}", ino.trim());
    let verbs = [
        "info v.img",
        "info --json v.img",
        "ls -lR v.img",
        "cat v.img:/text v.img:/dir/big",
        "find v.img",
        "du v.img",
        "df v.img",
        "extract --tar - v.img",
        "dump super v.img",
        "check v.img",
        "check --json --ignore-log v.img",
        "dump groups --json v.img",
        "dump log v.img",
        &dump,
    ];
    for case in 0..CASES {
        // A third of the cases are superblocks with a right checksum.
        let at = if case % 3 == 0 { 0 } else { used[index(&mut random, used.len())] };
        let mut sector = [0; SECTOR];
        image.read_exact_at(&mut sector, at).expect("a read");
        let sound = sector;
        for _ in 0..=random.below(3) {
            let end = if at == 0 { SUPERBLOCK } else { SECTOR };
            sector[index(&mut random, end)] = random.bytes(1)[0];
        }
        if at == 0 {
            csum::store(&mut sector, CRC);
        }
        image.write_all_at(&sector, at).expect("a write");
        for line in verbs {
            let begun = Instant::now();
            let output = lines::offshoot(few.dir(), &lines::words(line));
            let said = String::from_utf8_lossy(&output.stderr);
            let what = format!("seed {seed}, case {case} at {at}: {line}: {said}");
            let code = output.status.code().unwrap_or_else(|| panic!("a signal: {what}"));
            // `ls` ends with 2 where nothing is at a place.
            let is_known = [0, 1, 3, 4].contains(&code) || code == 2 && line.starts_with("ls");
            assert!(is_known && !said.contains("panicked"), "{code}: {what}");
            assert!(code == 0 || !said.is_empty(), "{code} without a word: {what}");
            assert!(begun.elapsed() < LIMIT, "{:?}: {what}", begun.elapsed());
        }
        image.write_all_at(&sound, at).expect("a write");
    }
    assert_eq!(few.does("cat v.img:/text"), "what the kernel wrote\n");
}
