//! Checks whole volumes: ours, and both modes of `btrfs check`.
//!
//! | volume | what the kernel filled it with |
//! |---|---|
//! | files | many files of a few bytes, 1,000 in each directory |
//! | sources | a source tree twenty times, as clones, with a snapshot after each |
//!
//! The original mode of `btrfs check` keeps a record of each extent and inode in memory. Its
//! low-memory mode looks up what belongs to an item when it meets the item, and takes hours for the
//! second volume, so it runs only with `--lowmem`.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use offshoot_testkit::btrfs::disks::MountedMembers;
use offshoot_testkit::btrfs::judges;
use offshoot_testkit::run::{command, try_run};
use rustix::fs::{SeekFrom, seek};

use crate::measure::run;
use crate::table::{self, SideRuns};
use crate::{BenchOptions, Result};

/// The argument with which this program reads an image and does nothing else.
pub(crate) const READ_DATA: &str = "read-data";

struct CheckBenchOptions {
    offshoot: PathBuf,
    dir: PathBuf,
    source: PathBuf,
    files: u64,
    rounds: usize,
    has_lowmem: bool,
}

/// How often the source tree is in the second volume.
const COPIES: u32 = 20;

/// Runs the benchmark; `None` for options that it does not know.
pub(crate) fn benchmark(args: &[String]) -> Option<Result> {
    let options = BenchOptions::parse(args, &["--source", "--files", "--rounds"], &["--lowmem"])?;
    let source = options.get("--source").unwrap_or("/usr/src/linux-source-6.1.tar.xz");
    let options = CheckBenchOptions {
        offshoot: options.program()?,
        dir: options.dir()?,
        source: source.into(),
        files: options.number("--files", 2_000_000)?,
        rounds: options.number("--rounds", 3).filter(|&rounds| rounds > 0)?,
        has_lowmem: options.has("--lowmem"),
    };
    Some(all(&options))
}

fn all(options: &CheckBenchOptions) -> Result {
    let _judges = judges::require().ok_or("the kernel makes the volumes, which takes root")?;
    fs::create_dir_all(&options.dir)
        .map_err(|error| format!("{}: {error}", options.dir.display()))?;
    let files = volume(options, &format!("check-{}-files", options.files), &|mount| {
        fill_with_files(mount, options.files)
    })?;
    let sources = volume(options, "check-sources", &|mount| fill_with_sources(mount, options))?;
    let own = std::env::current_exe().map_err(|error| format!("this program: {error}"))?;
    let mut sides = Vec::new();
    for (job, image) in [("files", &files), ("sources", &sources)] {
        let first = sides.len();
        let commands = commands(options, image, own.clone());
        sides.extend(commands.iter().map(|(name, _)| SideRuns {
            job: job.to_owned(),
            name: (*name).to_owned(),
            runs: Vec::new(),
        }));
        for round in 1..=options.rounds {
            for (index, (name, make)) in commands.iter().enumerate() {
                eprintln!("round {round} of {}: {job}: {name}", options.rounds);
                sides[first + index].runs.push(run(&mut make())?);
            }
        }
    }
    table::print(&sides);
    let json = options.dir.join("check.json");
    table::write_json(&json, &sides)?;
    println!("all runs: {}", json.display());
    Ok(())
}

/// Reads an image from its beginning to its end, but for its holes.
pub(crate) fn read_data(args: &[String]) -> Option<Result> {
    let [image] = args else { return None };
    let read = || {
        let file = File::open(image)?;
        let (mut buf, mut hole) = (vec![0; 1 << 20], 0);
        while let Ok(start) = seek(&file, SeekFrom::Data(hole)) {
            hole = seek(&file, SeekFrom::Hole(start))?;
            let mut at = start;
            while at < hole {
                let len = buf.len().min(usize::try_from(hole - at).unwrap_or(buf.len()));
                file.read_exact_at(&mut buf[..len], at)?;
                at += len as u64;
            }
        }
        std::io::Result::Ok(())
    };
    Some(read().map_err(|error| format!("{image}: {error}")))
}

type CheckCommand<'a> = (&'static str, Box<dyn Fn() -> Command + 'a>);

fn commands<'a>(
    options: &'a CheckBenchOptions,
    image: &'a Path,
    own: PathBuf,
) -> Vec<CheckCommand<'a>> {
    let ours = move |data: &'static [&'static str]| {
        move || {
            let mut ours = Command::new(&options.offshoot);
            ours.arg("check").args(data).arg(image);
            ours
        }
    };
    let theirs = move |args: &'static [&'static str]| {
        move || {
            let mut theirs = command("btrfs");
            theirs.args(["check", "--readonly"]).args(args).arg(image);
            theirs
        }
    };
    let mut commands: Vec<CheckCommand<'a>> = vec![
        ("ours", Box::new(ours(&[]))),
        ("btrfs check", Box::new(theirs(&[]))),
        ("ours --data", Box::new(ours(&["--data"]))),
        ("btrfs check, data", Box::new(theirs(&["--check-data-csum"]))),
        (
            "reading the image",
            Box::new(move || {
                let mut read = Command::new(own.clone());
                read.arg(READ_DATA).arg(image);
                read
            }),
        ),
    ];
    if options.has_lowmem {
        commands.push(("btrfs check, lowmem", Box::new(theirs(&["--mode=lowmem"]))));
    }
    commands
}

/// The volume called `name`, which the first run makes and keeps.
fn volume(
    options: &CheckBenchOptions,
    name: &str,
    fill: &dyn Fn(&Path) -> Result,
) -> Result<PathBuf> {
    const SIZE_BYTES: u64 = 40 << 30;
    let image = options.dir.join(format!("{name}.btrfs"));
    if image.exists() {
        return Ok(image);
    }
    eprintln!("making {}", image.display());
    let failed = |error: std::io::Error| format!("{}: {error}", image.display());
    let unfinished = image.with_extension("unfinished");
    File::create(&unfinished).and_then(|file| file.set_len(SIZE_BYTES)).map_err(failed)?;
    try_run("mkfs.btrfs", &["-q".as_ref(), unfinished.as_os_str()])?;
    let mount = MountedMembers::try_new(std::slice::from_ref(&unfinished), "noatime")?;
    fill(mount.path())?;
    mount.sync();
    drop(mount);
    fs::rename(&unfinished, &image).map_err(failed)?;
    Ok(image)
}

fn fill_with_files(mount: &Path, files: u64) -> Result {
    const IN_A_DIRECTORY: u64 = 1000;
    for first in (0..files).step_by(1000) {
        let dir = mount.join(format!("directory-{first}"));
        let failed = |error: std::io::Error| format!("{}: {error}", dir.display());
        fs::create_dir(&dir).map_err(failed)?;
        for number in first..files.min(first + IN_A_DIRECTORY) {
            fs::write(dir.join(format!("file-{number}")), number.to_le_bytes()).map_err(failed)?;
        }
    }
    Ok(())
}

fn fill_with_sources(mount: &Path, options: &CheckBenchOptions) -> Result {
    let live = mount.join("live");
    try_run("btrfs", &["subvolume".as_ref(), "create".as_ref(), live.as_os_str()])?;
    let first = live.join("copy-1");
    fs::create_dir(&first).map_err(|error| format!("{}: {error}", first.display()))?;
    let source = options.source.as_os_str();
    try_run("tar", &["-xf".as_ref(), source, "-C".as_ref(), first.as_os_str()])?;
    for number in 1..=COPIES {
        let copy = live.join(format!("copy-{number}"));
        if number > 1 {
            let how = ["-a".as_ref(), "--reflink=always".as_ref()];
            try_run("cp", &[how[0], how[1], first.as_os_str(), copy.as_os_str()])?;
        }
        let snapshot = mount.join(format!("snapshot-{number}"));
        let take = ["subvolume".as_ref(), "snapshot".as_ref(), "-r".as_ref()];
        try_run("btrfs", &[take[0], take[1], take[2], live.as_os_str(), snapshot.as_os_str()])?;
    }
    Ok(())
}
