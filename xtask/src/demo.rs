//! `cargo xtask demo`: a volume made of a directory of the repository, and what is in it.

use std::path::{Path, PathBuf};

use offshoot_testkit::fixture;

use crate::shell::{Result, cargo, run, target_dir};

/// What is used when nothing else is said.
const USAGE: &str = "demo [--program FILE] [--dir DIRECTORY]";

/// Makes a volume, fills it and shows what is in it: in a directory, and by a program that is built already, where the options say so.
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
    // What the commands are given is seen from the root of the repository.
    let absolute = |path: PathBuf| {
        std::path::absolute(&path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let program = absolute(program)?;
    let dir = dir.map_or_else(|| Ok(target_dir().join("demo")), absolute)?;
    std::fs::create_dir_all(&dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    show(&program, &dir.join("disk.img"))
}

/// Builds the program.
fn built() -> Result<PathBuf> {
    cargo(&["build", "--quiet", "--release", "--package", "offshoot"])?;
    Ok(target_dir().join("release/offshoot"))
}

fn show(program: &Path, image: &Path) -> Result {
    let (program, volume) = (shorter(program), shorter(image));
    let place = |path: &str| format!("{volume}:{path}");
    let offshoot = |args: &[&str]| -> Result {
        run(&program, args)?;
        println!();
        Ok(())
    };
    println!("\nA volume, made and filled without root and without the kernel's driver\n");
    offshoot(&["mkfs", &volume, "--force", "--size", "1G", "--label", "demo"])?;
    offshoot(&["cp", "-r", "crates", "README.md", &place("/")])?;
    offshoot(&["mkdir", "-p", &place("/home/alice/notes")])?;
    offshoot(&["mv", &place("/README.md"), &place("/home/alice/notes/about.md")])?;
    offshoot(&["ln", "-s", "notes/about.md", &place("/home/alice/about")])?;
    offshoot(&["ls", "-l", "-R", &place("/home")])?;
    offshoot(&["ls", "-l", &volume, &place("/crates/cli/src")])?;
    offshoot(&["info", &volume])?;
    println!("It is yours to play with: {volume}. The kernel mounts it, too.");
    Ok(())
}

/// The path from the root of the repository, where the commands run, if it is below it.
fn shorter(path: &Path) -> String {
    let relative = path.strip_prefix(fixture::repository()).unwrap_or(path);
    relative.display().to_string()
}
