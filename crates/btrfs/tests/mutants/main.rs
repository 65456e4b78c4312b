//! No write makes a volume worse: thousands of volumes with one wrong structure each, written by
//! all operations.
//!
//! ```text
//!   sound volume ── patch ──> mutant ── open for writing ── refused by name ──> nothing was written
//!    (7 layouts)  (a number)    │              │
//!                               │           churn: every operation, on files old and new
//!                               │              │
//!                          btrfs check      btrfs check      no new complaint
//!                          our view         our view         no untouched file is lost,
//!                          the kernel's     the kernel's     unless the kernel never showed it
//! ```
//!
//! A patch sets a field of an item or a superblock, swaps contents, removes an item, changes its
//! key, or adds one. It makes all checksums right, in all copies. What was wrong before may be
//! wrong afterwards.
//!
//! The cheapest judge looks first. `btrfs check` looks at the volume after the churn. Only when it
//! complains, it looks at the mutant before the churn too. The kernel looks when an untouched file
//! reads otherwise, and at a sample of all mutants. A new error is excused when the kernel leaves
//! the same one behind, after it has changed a copy of the mutant as much.
//!
//! The ordinary run does the same to the same volumes each time: it shows whether a change of ours
//! broke what held before. The campaign makes new volumes and looks for errors that were never
//! seen.
//!
//! - `OFFSHOOT_SEED` chooses another run, or repeats a run of a campaign.
//! - `OFFSHOOT_MUTANT` does one mutant of each layout alone, and prints what was done to it.
//! - `OFFSHOOT_MUTANTS` is the number of mutants of each layout.
//! - `OFFSHOOT_STRUCTURES` names the types of items that are patched (`INODE_ITEM,SUPERBLOCK`).
//! - `OFFSHOOT_KEEP` is a directory for images of the mutants that fail.

mod checked;
mod churn;
#[path = "../hostile/damage.rs"]
mod damage;
mod fields;
#[path = "../hostile/image.rs"]
mod image;
mod judge;
mod kernel;
#[path = "../../../btrfs-format/tests/mutation/mod.rs"]
mod mutation;
mod patch;
mod refused;
mod repaired;
mod stories;
#[path = "../shared/subvolume_calls.rs"]
mod subvolume_calls;
mod view;
mod volumes;

use std::hash::{DefaultHasher, Hasher};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use churn::Churn;
use image::Patched;
use judge::{CheckJudge, CheckMode, NO_END, ODD_CSUM};
use mutation::{from_env, seed_of};
use offshoot_btrfs::{BtrfsVolume, EngineOptions, SubvolumeId};
use offshoot_device::{BlockDevice, MemoryDevice};
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::random::{Random, is_in_run};
use offshoot_vfs::{Error, Result};
use patch::Patch;
use view::{PathView, view};
use volumes::{LAYOUTS, SoundVolume};

/// How long one mutant may take, on a slow machine.
const CASE_LIMIT: Duration = Duration::from_secs(120);

/// Mutants of each layout in a run without `OFFSHOOT_MUTANTS`.
const MUTANTS: u64 = 130;

/// The seed of a run without `OFFSHOOT_SEED`.
const SEED: u64 = 19;

/// The kernel looks at one mutant of so many without a reason.
const KERNEL_EVERY: u64 = 40;

type MutantMembers = Vec<Arc<MemoryDevice>>;

fn devices(members: &MutantMembers) -> Vec<Arc<dyn BlockDevice>> {
    members.iter().map(|member| member.clone() as Arc<dyn BlockDevice>).collect()
}

/// Devices with the same contents. What is written to them does not reach the originals.
fn copies(members: &MutantMembers) -> MutantMembers {
    members.iter().map(|member| Arc::new(member.snapshot())).collect()
}

/// A hash of what the devices hold over their images.
fn hash(members: &MutantMembers) -> u64 {
    let mut hasher = DefaultHasher::new();
    for member in members {
        member.hash_changes(&mut hasher);
    }
    hasher.finish()
}

/// What our reader shows. Where writing stopped, there may be a log that cannot be replayed,
/// because the replay meets the damage.
fn show(members: &MutantMembers) -> Result<PathView> {
    let open = |options: &EngineOptions| {
        let volume = BtrfsVolume::open(devices(members), options)?;
        volume.filesystem(SubvolumeId::FS)
    };
    let fs = open(&EngineOptions::default())
        .or_else(|_| open(&EngineOptions { is_log_ignored: true, ..EngineOptions::default() }))?;
    Ok(view(&fs))
}

/// The result of one mutant.
struct MutantOutcome {
    /// What our reader showed before; an error when the volume did not open.
    before: Result<PathView>,
    /// Why we refused to write it, if we did.
    refused: Option<Error>,
    /// The operations that were done, and the paths of `before` that they left alone.
    told: Vec<String>,
    untouched: Vec<Vec<u8>>,
}

/// Opens a mutant, does every operation, and closes it.
fn write(members: &MutantMembers, random: Random, has_thread: bool) -> MutantOutcome {
    let before = show(members);
    let told = Arc::new(Mutex::new(Vec::new()));
    let reports = told.clone();
    let options = EngineOptions {
        commit_interval: has_thread.then(|| Duration::from_secs(30)),
        reporter: Some(Arc::new(move |report| {
            reports.lock().expect("nothing panics").push(format!("reported: {report}"));
        })),
        ..EngineOptions::default()
    };
    let opened = BtrfsVolume::open_writable(devices(members), &options)
        .and_then(|volume| volume.filesystem(SubvolumeId::FS));
    let fs = match opened {
        Ok(fs) => fs,
        Err(error) => {
            return MutantOutcome { before, refused: Some(error), told: vec![], untouched: vec![] };
        }
    };
    let empty = PathView::new();
    let seen = before.as_ref().unwrap_or(&empty);
    let mut churn = Churn::new(&fs, seen, random);
    churn.run();
    let untouched = seen.keys().filter(|path| churn.is_untouched(seen, path)).cloned().collect();
    let mut all = std::mem::take(&mut churn.told);
    drop((churn, fs));
    all.append(&mut told.lock().expect("nothing panics"));
    MutantOutcome { before, refused: None, told: all, untouched }
}

/// Runs [`write`] on a thread of its own, within [`CASE_LIMIT`].
fn write_within_limit(
    members: &MutantMembers,
    random: Random,
    has_thread: bool,
) -> std::result::Result<MutantOutcome, String> {
    let (done, result) = mpsc::channel();
    let members = members.clone();
    std::thread::spawn(move || {
        let outcome = catch_unwind(AssertUnwindSafe(|| write(&members, random, has_thread)));
        drop(members);
        let _ = done.send(outcome);
    });
    match result.recv_timeout(CASE_LIMIT) {
        Ok(Ok(outcome)) => Ok(outcome),
        Ok(Err(panic)) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
            Err(format!("it panics: {}", text.unwrap_or_default()))
        }
        Err(_) => Err(format!("not done after {CASE_LIMIT:?}")),
    }
}

/// The untouched paths that do not read as before.
fn changed(before: &PathView, after: &PathView, untouched: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let is_lost = |path: &&Vec<u8>| {
        let old = &before[*path];
        old.contents.is_ok() && after.get(*path).is_none_or(|new| !new.reads_as(old))
    };
    untouched.iter().filter(|path| before.contains_key(*path)).filter(is_lost).cloned().collect()
}

fn paths(paths: &[Vec<u8>]) -> String {
    let shown = paths.iter().take(3).map(|path| path.escape_ascii().to_string());
    format!("{} paths ({})", paths.len(), shown.collect::<Vec<_>>().join(", "))
}

/// Counts the results of mutants.
#[derive(Debug, Default)]
struct MutantCounts {
    refused: u64,
    written: u64,
    broken_off: u64,
    complained_of: u64,
    seen_by_kernel: u64,
    /// The kernel leaves the same error behind.
    excused: u64,
}

/// How often the kernel changes copies of a mutant until it leaves the same errors behind.
const KERNEL_TURNS: usize = 4;

/// Makes and writes one mutant of a volume. Returns the problems.
fn judge(
    sound: &mut SoundVolume,
    seed: u64,
    number: u64,
    tally: &mut MutantCounts,
    is_told: bool,
) -> Vec<String> {
    // Each output of a generator seeds the next one, because streams of nearby seeds are much
    // alike.
    let mut random =
        Random::new(Random::new(Random::new(seed).number() ^ number).number() ^ sound.number);
    let patch = std::iter::repeat_with(|| sound.structures.draw(&sound.target, &mut random));
    let patch = patch.flatten().next().expect("some patch can be done");
    let over = |image| Arc::new(MemoryDevice::over(Arc::new(Patched::new(image))));
    let mutant: MutantMembers = sound.images.iter().map(over).collect();
    patch.apply(&sound.target, &mutant);
    let members = copies(&mutant);
    let has_thread = random.below(4) == 0;
    let mut problems = Vec::new();
    let outcome = write_within_limit(&members, random, has_thread);
    if let Ok(outcome) = &outcome {
        let kernel_is_asked = number.is_multiple_of(KERNEL_EVERY);
        problems = verdict(sound, &patch, &mutant, &members, outcome, tally, kernel_is_asked);
    }
    let told = match outcome {
        Ok(MutantOutcome { refused, told, .. }) => {
            [refused.map(|error| format!("refused: {error}")).into_iter().collect(), told].concat()
        }
        Err(problem) => {
            problems.push(problem);
            vec![]
        }
    };
    if is_told || !problems.is_empty() {
        let reports = told.iter().filter(|told| is_told || told.starts_with("reported"));
        let reports: Vec<_> = reports.take(200).cloned().collect();
        let lines = [vec![patch.what.clone()], problems.clone(), reports].concat();
        println!("mutant {number}: {}", lines.join("\n    "));
    }
    if let Some(dir) = std::env::var_os("OFFSHOOT_KEEP").filter(|_| is_told || !problems.is_empty())
    {
        let dir = std::path::Path::new(&dir).join(format!("{}-{number}", sound.name));
        sound.judge.keep(&mutant, &dir.join("before"));
        sound.judge.keep(&members, &dir.join("after"));
    }
    problems.iter().map(|problem| format!("mutant {number}: {}: {problem}", patch.what)).collect()
}

/// A change for the worse.
enum MutantProblem {
    /// A kind of complaints of `btrfs check`, and an example.
    Complaint(String, String),
    /// Untouched files are lost.
    Lost(String),
    /// An error that is never excused, whatever the kernel does.
    Never(String),
}

impl MutantProblem {
    fn text(self) -> String {
        match self {
            Self::Complaint(_, text) => format!("btrfs check: {text}"),
            Self::Lost(text) | Self::Never(text) => text,
        }
    }
}

/// What `btrfs check` finds in `now` and does not find in `before`.
///
/// Its original mode loses its records of inodes where an entry names the last inode number, or
/// where a damaged entry is in a leaf that snapshots share. So its low-memory mode must confirm
/// complaints about files.
fn complaints(
    judge: &mut CheckJudge,
    before: &MutantMembers,
    now: &MutantMembers,
) -> Vec<MutantProblem> {
    let after = judge.check(now, CheckMode::Original);
    if after.is_empty() {
        return vec![];
    }
    let known = judge.check(before, CheckMode::Original);
    // Where it does not end, it reports nothing.
    if known.is_broken {
        return vec![];
    }
    let mut beyond = after.beyond(&known);
    if beyond.keys().any(|kind| is_of_files(kind)) {
        let after = judge.check(now, CheckMode::Lowmem);
        let known = judge.check(before, CheckMode::Lowmem);
        if !after.is_worse_for_files_than(&known) {
            beyond.retain(|kind, _| !is_of_files(kind));
        }
    }
    beyond.into_iter().map(|(kind, text)| MutantProblem::Complaint(kind, text)).collect()
}

/// Whether this kind of complaints is about inodes and names of a subvolume, or may come from them.
fn is_of_files(kind: &str) -> bool {
    kind.starts_with("root # ") || kind.starts_with("unresolved ref ") || kind == NO_END
}

/// The untouched paths that the kernel does not show any more; `None` when the kernel did not mount
/// the volume before.
fn lost_to_kernel(
    judge: &mut CheckJudge,
    before: &MutantMembers,
    now: &MutantMembers,
    untouched: &[Vec<u8>],
) -> Option<std::result::Result<Vec<Vec<u8>>, String>> {
    let before = judge.kernel(before).ok()?;
    Some(judge.kernel(now).map(|after| changed(&before, &after, untouched)))
}

/// The problems of `mutant`, which has become `members`.
fn verdict(
    sound: &mut SoundVolume,
    patch: &Patch,
    mutant: &MutantMembers,
    members: &MutantMembers,
    outcome: &MutantOutcome,
    tally: &mut MutantCounts,
    kernel_is_asked: bool,
) -> Vec<String> {
    let mut problems = Vec::new();
    if let Some(error) = &outcome.refused {
        tally.refused += 1;
        if hash(mutant) == hash(members) {
            return vec![];
        }
        // Before the first subvolume is opened, the engine removes files without names.
        if !matches!(error, Error::Corrupt(_)) {
            problems.push(MutantProblem::Never(format!("it is refused and was written: {error}")));
        }
    } else {
        tally.written += 1;
    }
    tally.broken_off +=
        u64::from(outcome.told.iter().any(|told| told.contains("the volume is only read")));
    problems.extend(complaints(&mut sound.judge, mutant, members));
    // `btrfs check` looks only at runs of checksums that are followed by others, so a write can
    // bring a run to its sight that has had no extent, or an unwritten one, since the patch.
    let was_hidden = |kind: &str, text: &str| {
        let is_of_patch = |ino| kind == ODD_CSUM && text.contains(&format!(" {ino} "));
        patch.is_of_extents && kind.starts_with("csum exists for #")
            || patch.extent_of.is_some_and(is_of_patch)
    };
    problems.retain(|problem| {
        !matches!(problem, MutantProblem::Complaint(kind, text) if was_hidden(kind, text))
    });
    tally.complained_of += u64::from(!problems.is_empty());
    if let Ok(before) = &outcome.before {
        let lost = match show(members) {
            Ok(after) => changed(before, &after, &outcome.untouched),
            Err(_) => outcome.untouched.clone(),
        };
        if !lost.is_empty() || kernel_is_asked {
            tally.seen_by_kernel += 1;
            match lost_to_kernel(&mut sound.judge, mutant, members, &outcome.untouched) {
                Some(Ok(lost)) if lost.is_empty() => {}
                Some(Ok(lost)) => problems.push(MutantProblem::Lost(format!(
                    "the kernel does not show any more: {}",
                    paths(&lost)
                ))),
                Some(Err(error)) => {
                    problems
                        .push(MutantProblem::Lost(format!("it does not mount any more: {error}")));
                }
                None if lost.is_empty() => {}
                None => problems.push(MutantProblem::Lost(format!(
                    "we do not show any more: {}",
                    paths(&lost)
                ))),
            }
        }
        if !problems.is_empty() {
            // What the kernel leaves behind depends on when it commits, and on what it removes.
            for turn in 0..KERNEL_TURNS {
                if !problems.is_empty() {
                    let seen = (before, &outcome.untouched[..]);
                    excuse(&mut sound.judge, mutant, seen, turn, &mut problems);
                }
            }
            tally.excused += u64::from(problems.is_empty());
        }
    }
    problems.into_iter().map(MutantProblem::text).collect()
}

/// Removes the problems that the kernel causes as well, when it changes a copy as much.
fn excuse(
    judge: &mut CheckJudge,
    mutant: &MutantMembers,
    (before, untouched): (&PathView, &[Vec<u8>]),
    turn: usize,
    problems: &mut Vec<MutantProblem>,
) {
    let touched: Vec<_> = before.keys().filter(|path| !untouched.contains(path)).cloned().collect();
    let disks =
        match judge.kernel_changes(mutant, move |mount| kernel::churn(mount, &touched, turn)) {
            Ok(disks) => disks,
            Err(error) => return println!("    the kernel does not change it: {error}"),
        };
    let theirs = judge.images_over(&disks);
    let kinds = complaints(judge, mutant, &theirs);
    let is_lost = match lost_to_kernel(judge, mutant, &theirs, untouched) {
        Some(Ok(lost)) => !lost.is_empty(),
        Some(Err(_)) => true,
        None => false,
    };
    let is_theirs = |kind: &String| {
        kinds.iter().any(|theirs| matches!(theirs, MutantProblem::Complaint(one, _) if one == kind))
    };
    problems.retain(|problem| match problem {
        MutantProblem::Complaint(kind, _) => !is_theirs(kind) && !is_lost,
        MutantProblem::Lost(_) => !is_lost,
        MutantProblem::Never(_) => true,
    });
    if !problems.is_empty() {
        let theirs = kinds.into_iter().map(MutantProblem::text).collect::<Vec<_>>();
        println!("    the kernel loses {is_lost}, and leaves: {}", theirs.join("; "));
    }
}

/// Judges mutants of a volume, and returns the problems.
fn sweep(mut sound: SoundVolume, seed: u64, numbers: impl Iterator<Item = u64>) -> Vec<String> {
    let is_told = from_env("OFFSHOOT_MUTANT").is_some();
    let (mut tally, mut problems) = (MutantCounts::default(), Vec::new());
    for number in numbers {
        let found = judge(&mut sound, seed, number, &mut tally, is_told);
        problems.extend(found.into_iter().map(|problem| format!("{}: {problem}", sound.name)));
    }
    println!("{}: {tally:?}", sound.name);
    problems
}

/// The numbers of an ordinary run, or the one of `OFFSHOOT_MUTANT`.
fn numbers() -> std::ops::Range<u64> {
    match from_env("OFFSHOOT_MUTANT") {
        Some(number) => number..number + 1,
        None => 0..from_env("OFFSHOOT_MUTANTS").unwrap_or(MUTANTS),
    }
}

fn sweep_of(name: &str) {
    let Some(judges) = judges::require() else { return };
    if !is_in_run(&format!("mutants of {name}")) {
        return;
    }
    let seed = from_env("OFFSHOOT_SEED").unwrap_or(SEED);
    println!("{name}: OFFSHOOT_SEED={seed}");
    let layout = LAYOUTS.iter().find(|layout| layout.name == name).expect("a layout");
    let problems = sweep(layout.carried(&judges), seed, numbers());
    assert!(problems.is_empty(), "OFFSHOOT_SEED={seed}\n{}", problems.join("\n"));
}

#[test]
fn default() {
    sweep_of("default");
}

#[test]
fn small_nodes() {
    sweep_of("small-nodes");
}

#[test]
fn raid1() {
    sweep_of("raid1");
}

#[test]
fn mixed() {
    sweep_of("mixed");
}

#[test]
fn old() {
    sweep_of("old");
}

#[test]
fn block_group_tree() {
    sweep_of("block-group-tree");
}

#[test]
fn xxhash() {
    sweep_of("xxhash");
}

/// Makes the carried volumes anew. The same seed then makes other mutants.
#[test]
#[ignore = "it changes the repository"]
fn carry_new_volumes() {
    let Some(judges) = judges::require() else { return };
    for layout in &LAYOUTS {
        layout.carry(&judges);
    }
}

/// More mutants than fit into a test run: `cargo xtask campaign mutants`.
#[test]
#[ignore = "takes as long as one likes; cargo xtask campaign mutants runs it"]
fn campaign() {
    /// How many mutants are made of a sound volume before the next volume.
    const BATCH: u64 = 1000;
    let seed = seed_of("campaign");
    let count = from_env("OFFSHOOT_MUTANTS").unwrap_or(10_000);
    let starts: Vec<u64> = (0..count).step_by(usize::try_from(BATCH).expect("small")).collect();
    let jobs = starts.iter().flat_map(|&start| LAYOUTS.iter().map(move |layout| (start, layout)));
    let jobs = Mutex::new(jobs);
    let problems = Mutex::new(Vec::new());
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let job = jobs.lock().expect("nothing panics").next();
                    let Some((start, layout)) = job else { return };
                    let numbers = start..count.min(start + BATCH);
                    let Some(judges) = judges::require() else { return };
                    let found = sweep(layout.make(&judges), seed, numbers);
                    problems.lock().expect("nothing panics").extend(found);
                }
            });
        }
    });
    let problems = problems.into_inner().expect("nothing panics");
    assert!(problems.is_empty(), "OFFSHOOT_SEED={seed}\n{}", problems.join("\n"));
}
