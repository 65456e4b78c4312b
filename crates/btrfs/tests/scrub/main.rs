//! Scrubbing: a scrub finds all damage and nothing else, and repairs what can be repaired.
//!
//! | module | what | judge |
//! |---|---|---|
//! | `same` | damaged volumes of the kernel, of every profile | the kernel's own scrub of a copy: the same counters; `btrfs check`, and the kernel's scrub after the repair |
//! | `left` | damage that a scrub cannot repair, or must not | the names of files, and the bytes of the images |
//! | `live` | volumes that change meanwhile | no error but those that the test makes; the bytes of files, `btrfs check` |

mod left;
mod live;
mod same;

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use offshoot_btrfs::{
    BtrfsVolume, EngineOptions, ScrubCounts, ScrubEvent, ScrubFinding, ScrubOptions,
};
use offshoot_device::BlockDevice;
use offshoot_testkit::btrfs::disks::Disks;
use offshoot_testkit::run::command;
use offshoot_vfs::Result;

/// Opens a volume as it is stored, without a replay of its log.
fn stored(devices: Vec<Arc<dyn BlockDevice>>, is_degraded: bool) -> Arc<BtrfsVolume> {
    let options = EngineOptions { is_log_ignored: true, is_degraded, ..EngineOptions::default() };
    BtrfsVolume::open(devices, &options).expect("it opens")
}

/// The counters and findings of a scrub.
fn scrub(volume: &BtrfsVolume, is_read_only: bool) -> Result<(ScrubCounts, Vec<ScrubFinding>)> {
    let found = Mutex::new(Vec::new());
    let watch = |event: &ScrubEvent<'_>| {
        match event {
            ScrubEvent::Found(finding) => found.lock().expect("no panic").push((*finding).clone()),
            ScrubEvent::Skipped(chunk, error) => println!("the chunk at {chunk}: {error}"),
            ScrubEvent::Progress(_) => {}
        }
        ControlFlow::Continue(())
    };
    let counts = volume.scrub(&ScrubOptions { is_read_only }, &watch)?;
    Ok((counts, found.into_inner().expect("no panic")))
}

/// The same, of a volume that must be sound.
#[track_caller]
fn scrubs_clean(disks: &Disks) -> ScrubCounts {
    let (counts, found) = scrub(&stored(disks.devices(), false), true).expect("it is scrubbed");
    assert_eq!((counts.found_errors(), &found[..]), (0, &[][..]), "{counts:?}");
    counts
}

/// The counters of the kernel's read-only scrub of a mount.
fn kernel_scrub(mount: &Path) -> BTreeMap<String, u64> {
    let output = command("btrfs")
        .args(["scrub", "start", "-BrR"])
        .arg(mount)
        .output()
        .expect("btrfs scrub runs");
    let text = String::from_utf8_lossy(&output.stdout);
    let counters = text.lines().filter_map(|line| {
        let (name, number) = line.trim().split_once(": ")?;
        Some((name.to_owned(), number.trim().parse().ok()?))
    });
    let counters: BTreeMap<_, _> = counters.collect();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(counters.contains_key("tree_extents_scrubbed"), "{text}{said}");
    counters
}
