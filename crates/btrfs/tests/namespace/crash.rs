//! Power cuts: every state that one could leave is opened, and holds what was acknowledged.
//!
//! Each step makes a file with data, counts it in another file, takes a name away and syncs; then the step is
//! marked. A cut anywhere must leave the volume as some step left it, no earlier than the last one that was
//! marked before the cut, and writable. A sample of the states is judged by `btrfs check`.

use std::io::Write;
use std::sync::Arc;

use offshoot_btrfs::{Filesystem, MkfsOptions, OpenOptions, Volume, mkfs};
use offshoot_btrfs_format::TreeId;
use offshoot_device::{BlockDevice, CrashDevice, CrashPlan, MemoryDevice};
use offshoot_testkit::judges;
use offshoot_testkit::run::run;
use offshoot_vfs::{FileSystem, FileSystemMut, Timestamp};
use uuid::Uuid;

use crate::common::{AT, NEW, place};

const STEPS: usize = 12;
const SIZE: u64 = 160 << 20;

/// Every how many states one goes to `btrfs check`.
const JUDGED: usize = 60;

fn data(step: usize) -> Vec<u8> {
    (0..=step * 700).map(|at| u8::try_from((at * 7 + step) % 251).expect("below 251")).collect()
}

fn open(device: Arc<dyn BlockDevice>) -> (Arc<Volume>, Filesystem) {
    let volume = Volume::open_writable(vec![device], &OpenOptions::default()).expect("it opens");
    let fs = volume.filesystem(TreeId::FS).expect("the top level");
    (volume, fs)
}

fn step(fs: &Filesystem, number: usize) {
    let root = fs.root();
    if number == 0 {
        fs.create(place(root, "count"), &NEW).expect("a file");
        fs.create(place(root, "passing"), &NEW).expect("a file");
    }
    let file = fs.create(place(root, &format!("file{number}")), &NEW).expect("a file");
    fs.write(file, 0, &data(number), AT).expect("there is room");
    let count = fs.lookup(root, b"count").expect("the count");
    fs.write(count, 0, &number.to_le_bytes(), AT).expect("there is room");
    let passing = if number == 0 { "passing".to_owned() } else { format!("passing{number}") };
    let next = format!("passing{}", number + 1);
    fs.rename(place(root, &passing), place(root, &next), AT).expect("it moves");
}

/// The step after which the volume was in this state; `None` before the first.
fn found(fs: &Filesystem) -> Option<usize> {
    let count = fs.lookup(fs.root(), b"count").ok()?;
    let mut bytes = [0; 8];
    assert_eq!(fs.read(count, 0, &mut bytes).expect("it reads"), 8);
    let last = usize::from_le_bytes(bytes);
    for number in 0..STEPS {
        let file = fs.lookup(fs.root(), format!("file{number}").as_bytes());
        assert_eq!(file.is_ok(), number <= last, "file{number} after step {last}");
        if let Ok(file) = file {
            let mut bytes = vec![0; data(number).len() + 1];
            let len = fs.read(file, 0, &mut bytes).expect("it reads");
            assert!(bytes[..len] == data(number), "the data of file{number} after step {last}");
        }
        let passing = fs.lookup(fs.root(), format!("passing{}", number + 1).as_bytes());
        assert_eq!(passing.is_ok(), number == last, "passing{} after step {last}", number + 1);
    }
    Some(last)
}

fn judge(device: &dyn BlockDevice) {
    if judges::require().is_none() {
        return;
    }
    let mut image = tempfile::NamedTempFile::new().expect("a file");
    let mut bytes = vec![0; 1 << 20];
    for offset in (0..SIZE).step_by(bytes.len()) {
        device.read_at(offset, &mut bytes).expect("it reads");
        image.write_all(&bytes).expect("it is written");
    }
    let path = image.path().to_str().expect("a plain path");
    run("btrfs", &["check", "--readonly", "--check-data-csum", path]);
}

#[test]
fn nothing_acknowledged_is_lost() {
    let seed = std::env::var("OFFSHOOT_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| u64::from(std::process::id()));
    eprintln!("OFFSHOOT_SEED={seed}");
    let base: Arc<dyn BlockDevice> = Arc::new(MemoryDevice::sparse(SIZE));
    let options = MkfsOptions::new(Uuid::from_u128(11), Timestamp::default());
    mkfs(std::slice::from_ref(&base), &options).expect("a volume");
    let crash = Arc::new(CrashDevice::new(base));
    let (volume, fs) = open(crash.clone());
    for number in 0..STEPS {
        step(&fs, number);
        fs.sync().expect("a commit");
        crash.mark(&number.to_string());
    }
    drop((fs, volume));

    let plan = CrashPlan { exhaustive_limit: 4, samples_per_epoch: 12, seed, torn: true };
    let mut states = 0;
    for state in crash.log().states(&plan) {
        let state = state.expect("the base reads");
        let acknowledged = state.marks().len();
        let what = format!("state {}: {}", state.number, state.description);
        if state.number % JUDGED == 0 {
            judge(&state.device);
        }
        let device = Arc::new(state.device);
        let (volume, fs) = open(device.clone());
        let steps = found(&fs).map_or(0, |last| last + 1);
        assert!(steps >= acknowledged, "{what}: {acknowledged} acknowledged, {steps} there");
        // It goes on from there.
        fs.create(place(fs.root(), "afterwards"), &NEW).expect("a file");
        fs.sync().expect("a commit");
        drop((fs, volume));
        let (_volume, fs) = open(device);
        assert!(fs.lookup(fs.root(), b"afterwards").is_ok(), "{what}");
        states += 1;
    }
    eprintln!("{states} states");
    assert!(states > 200, "{states} states are too few to prove anything");
}
