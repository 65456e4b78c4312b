//! `cargo xtask demo`: shows the program at work on a new volume.
//!
//! The profile `demo` of the workspace builds fast, and optimises little. The program and the
//! volume stay in one directory below the target directory. The last lines of output name it.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use offshoot_machine::repository;

use crate::shell::{Result, cargo_seen, run, target_dir};

/// The options of this task.
const USAGE: &str = "demo [--program FILE] [--dir DIRECTORY]";

/// The directory of the repository that the volume is filled with.
const SOURCE: &str = "crates";

/// Makes a volume, fills it, and shows the program at work on it. `--dir` names another directory,
/// and `--program` a program that is built already.
pub(crate) fn demo(options: &[&str]) -> Result {
    let (mut program, mut dir) = (None, None);
    for pair in options.chunks(2) {
        match *pair {
            ["--program", file] => program = Some(PathBuf::from(file)),
            ["--dir", path] => dir = Some(PathBuf::from(path)),
            _ => return Err(format!("the options are: {USAGE}")),
        }
    }
    let program = program.map_or_else(built, Ok)?;
    // The commands run in the root of the repository, so their paths must be absolute or start
    // there.
    let absolute = |path: PathBuf| std::path::absolute(&path).map_err(|error| of(&path, &error));
    let program = absolute(program)?;
    let dir = dir.map_or_else(|| Ok(target_dir().join("demo")), absolute)?;
    std::fs::create_dir_all(&dir).map_err(|error| of(&dir, &error))?;
    Demo { program: shorter(&program), dir }.run()
}

/// Builds the program.
fn built() -> Result<PathBuf> {
    println!("Building the program first; that takes a minute or two when nothing is built yet.");
    cargo_seen(&[], &["build", "--profile", "demo", "--package", "offshoot-cli"], &mut |_| {})?;
    Ok(target_dir().join("demo/offshoot"))
}

struct Demo {
    program: String,
    dir: PathBuf,
}

impl Demo {
    fn run(&self) -> Result {
        let volume = shorter(&self.dir.join("disk.img"));
        let place = |path: &str| format!("{volume}:{path}");

        say("A volume, made and filled without root and without the kernel's driver");
        self.offshoot(&["mkfs", &volume, "--force", "--size", "1G", "--label", "demo"])?;
        self.offshoot(&["cp", "-r", SOURCE, "README.md", &place("/")])?;
        say("What is in it");
        self.offshoot(&["ls", "-l", &place("/"), &place("/crates/cli/src")])?;
        self.offshoot(&["info", &volume])?;
        say("A snapshot, and changes after it, which it does not see");
        self.offshoot(&["subvolume", "snapshot", "-r", &place("/"), &place("/before")])?;
        self.offshoot(&["mkdir", "-p", &place("/home/alice/notes")])?;
        self.offshoot(&["mv", &place("/README.md"), &place("/home/alice/notes/about.md")])?;
        self.offshoot(&["ln", "-s", "notes/about.md", &place("/home/alice/about")])?;
        self.offshoot(&["rm", "-r", &place("/crates/cli")])?;
        self.offshoot(&["ls", "-l", "-R", &place("/home")])?;
        self.offshoot(&["ls", &place("/crates"), &place("/before/crates")])?;
        self.mount(&volume)?;
        say("The snapshot taken out, and compared with what went in");
        let out = self.dir.join("out");
        remove_tree(&out)?;
        self.offshoot(&["extract", &place("/before"), &shorter(&out)])?;
        let files = same_files(&repository().join(SOURCE), &out.join(SOURCE))?;
        println!("{files} files of {SOURCE}/ came out byte for byte as they went in.\n");

        println!(
            "The program is {}, built quickly. `cargo install --path crates/cli`",
            self.program
        );
        println!(
            "builds one that is fast. The volume is yours to play with, the kernel mounts it too:"
        );
        println!("  {} ls -l {volume}", self.program);
        Ok(())
    }

    /// Runs the program.
    fn offshoot(&self, args: &[&str]) -> Result {
        run(&self.program, args)?;
        println!();
        Ok(())
    }

    /// Mounts the volume and runs programs of the host on it, or says why mounting fails.
    fn mount(&self, volume: &str) -> Result {
        say("Mounted, for every program");
        let dir = self.dir.join("mnt");
        // An interrupted demonstration may have left it.
        if !dir.is_dir() {
            std::fs::create_dir_all(&dir).map_err(|error| of(&dir, &error))?;
        }
        let dir = shorter(&dir);
        println!("$ {} mount {volume} {dir}", self.program);
        let mut mount = Command::new(&self.program);
        mount.args(["mount", volume, &dir]).current_dir(repository());
        let mounted = mount.output().map_err(|error| of(Path::new(&self.program), &error))?;
        if !mounted.status.success() {
            let reason = String::from_utf8_lossy(&mounted.stderr);
            let reason = reason.lines().next().unwrap_or("mount says nothing");
            println!("This machine does not let it, and nothing else needs it: {reason}\n");
            return Ok(());
        }
        let note = "echo 'Written through the mount.' > \"$0\"/home/alice/notes/todo.md";
        let used = run("sh", &["-c", note, &dir])
            .and_then(|()| run("ls", &["-l", &format!("{dir}/home/alice/notes")]));
        // Unmounts also when a program failed.
        run(&self.program, &["unmount", &dir])?;
        println!();
        used?;
        self.offshoot(&["cat", &format!("{volume}:/home/alice/notes/todo.md")])
    }
}

fn say(what: &str) {
    println!("== {what}\n");
}

fn of(path: &Path, error: &io::Error) -> String {
    format!("{}: {error}", path.display())
}

fn remove_tree(path: &Path) -> Result {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(of(path, &error)),
        _ => Ok(()),
    }
}

/// Checks that two directories have the same names and bytes below them. Returns the number of
/// files.
fn same_files(one: &Path, other: &Path) -> Result<u64> {
    let listed = |dir: &Path| -> Result<Vec<_>> {
        let entries = std::fs::read_dir(dir).map_err(|error| of(dir, &error))?;
        let names = entries.map(|entry| entry.map(|entry| entry.file_name()));
        let mut names: Vec<_> = names.collect::<io::Result<_>>().map_err(|e| of(dir, &e))?;
        names.sort();
        Ok(names)
    };
    let mut count = 0;
    let mut todo = vec![(one.to_owned(), other.to_owned())];
    while let Some((one, other)) = todo.pop() {
        if one.is_dir() {
            let names = listed(&one)?;
            if names != listed(&other)? {
                return Err(format!("{} and {} differ", one.display(), other.display()));
            }
            todo.extend(names.iter().map(|name| (one.join(name), other.join(name))));
            continue;
        }
        if !same_bytes(&one, &other)? {
            return Err(format!("{} and {} differ", one.display(), other.display()));
        }
        count += 1;
    }
    Ok(count)
}

fn same_bytes(one: &Path, other: &Path) -> Result<bool> {
    let read = |path: &Path| std::fs::read(path).map_err(|error| of(path, &error));
    Ok(read(one)? == read(other)?)
}

/// The path relative to the root of the repository, where the commands run, if it lies below it.
fn shorter(path: &Path) -> String {
    let relative = path.strip_prefix(repository()).unwrap_or(path);
    relative.display().to_string()
}
