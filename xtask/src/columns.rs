//! The width of comments: at most 100 columns.
//!
//! The formatter breaks code and leaves comments alone. A row of a table and a picture between
//! fences may be wider, because nothing can break them.

use std::fs;
use std::path::{Path, PathBuf};

use offshoot_machine::repository;

use crate::shell::Result;

/// The most columns of a line.
const MOST: usize = 100;

/// Where the sources are.
const SOURCES: &[&str] = &["bench", "crates", "fuzz", "xtask"];

/// Checks the comments of all sources.
///
/// # Errors
/// The places of lines that are wider.
pub(crate) fn check() -> Result {
    let mut wide = Vec::new();
    for folder in SOURCES {
        let folder = repository().join(folder);
        visit(&folder, &mut wide).map_err(|error| format!("{}: {error}", folder.display()))?;
    }
    if wide.is_empty() {
        return Ok(());
    }
    Err(format!("comments wider than {MOST} columns:\n{}", wide.join("\n")))
}

fn visit(folder: &Path, wide: &mut Vec<String>) -> std::io::Result<()> {
    let entries: std::io::Result<Vec<PathBuf>> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect();
    let mut entries = entries?;
    entries.sort();
    for path in entries {
        if path.is_dir() {
            // A workspace of its own may build into a folder of its own.
            if path.file_name().is_some_and(|name| name != "target") {
                visit(&path, wide)?;
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            let text = fs::read_to_string(&path)?;
            let lines = wide_comments(&text);
            let place = path.strip_prefix(repository()).unwrap_or(&path).display().to_string();
            wide.extend(lines.into_iter().map(|line| format!("{place}:{line}")));
        }
    }
    Ok(())
}

/// The numbers of the comment lines that are too wide.
fn wide_comments(text: &str) -> Vec<usize> {
    let (mut wide, mut is_picture) = (Vec::new(), false);
    for (number, line) in (1..).zip(text.lines()) {
        let Some(comment) = line.trim_start().strip_prefix("//") else {
            is_picture = false;
            continue;
        };
        let comment = comment.trim_start_matches(['/', '!']).trim_start();
        if comment.starts_with("```") {
            is_picture = !is_picture;
        }
        let is_free = is_picture || comment.starts_with('|');
        if !is_free && line.chars().count() > MOST {
            wide.push(number);
        }
    }
    wide
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_comments_are_found_and_pictures_are_not() {
        let wide = "x".repeat(MOST);
        let text = format!(
            "//! {wide}\n//! | {wide} |\n//! ```text\n//! {wide}\n//! ```\n//! {wide}\nlet a = \
             \"{wide}\";\n    // {wide}\n/// {}\n",
            &wide[4..]
        );
        assert_eq!(wide_comments(&text), [1, 6, 8]);
    }
}
