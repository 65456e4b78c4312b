//! Random archives against a plain model of what they mean.

use std::collections::BTreeMap;

use offshoot_testkit::random::Random;

use super::{BuildSite, directory, file, linked};

/// What a path is in the model.
#[derive(Clone, Debug, PartialEq, Eq)]
enum TarModelNode {
    Directory,
    /// A regular file, by a number that all its names have.
    File(usize),
    Symlink(String),
}

#[derive(Default)]
struct TarModel {
    nodes: BTreeMap<String, TarModelNode>,
    contents: Vec<String>,
}

impl TarModel {
    /// Whether all above `path` are directories, or can become some.
    fn takes(&self, path: &str) -> bool {
        let ends = path.match_indices('/').map(|(at, _)| &path[..at]);
        ends.into_iter()
            .all(|way| matches!(self.nodes.get(way), None | Some(TarModelNode::Directory)))
    }

    fn put(&mut self, path: &str, node: TarModelNode) {
        for (at, _) in path.match_indices('/') {
            self.nodes.insert(path[..at].to_owned(), TarModelNode::Directory);
        }
        if node != TarModelNode::Directory || self.nodes.get(path) != Some(&TarModelNode::Directory)
        {
            let below = format!("{path}/");
            self.nodes.retain(|other, _| other != path && !other.starts_with(&below));
        }
        self.nodes.insert(path.to_owned(), node);
    }

    fn shown(&self) -> String {
        let names = |number| {
            self.nodes.values().filter(|node| **node == TarModelNode::File(number)).count()
        };
        let line = |(path, node): (&String, &TarModelNode)| match node {
            TarModelNode::Directory => format!("{path} /\n"),
            TarModelNode::File(number) => {
                format!("{path} x{} {}\n", names(*number), self.contents[*number])
            }
            TarModelNode::Symlink(target) => format!("{path} -> {target}\n"),
        };
        let mut lines: Vec<_> = self.nodes.iter().map(line).collect();
        lines.sort();
        lines.concat()
    }
}

fn one_of<T: Clone>(random: &mut Random, choices: &[T]) -> T {
    let at = usize::try_from(random.below(choices.len() as u64)).expect("a small number");
    choices[at].clone()
}

#[test]
fn a_volume_holds_what_an_archive_means() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut model = TarModel::default();
        let mut members = Vec::new();
        for step in 0..40 {
            let depth = 1 + random.below(3);
            let names: Vec<_> = (0..depth).map(|_| one_of(&mut random, &["a", "b", "c"])).collect();
            let path = names.join("/");
            if !model.takes(&path) {
                continue;
            }
            match random.below(5) {
                0 => {
                    members.push(directory(&format!("./{path}/"), step));
                    model.put(&path, TarModelNode::Directory);
                }
                1 => {
                    members.push(linked(&path, b'2', "target"));
                    model.put(&path, TarModelNode::Symlink("target".to_owned()));
                }
                2 => {
                    let files: Vec<_> = model
                        .nodes
                        .iter()
                        .filter(|(_, node)| !matches!(node, TarModelNode::Directory))
                        .map(|(path, node)| (path.clone(), node.clone()))
                        .collect();
                    if files.is_empty() {
                        continue;
                    }
                    let (target, node) = one_of(&mut random, &files);
                    // What is replaced takes a file in it along, and a link to a link is one more
                    // link, which the model does not count.
                    if target.starts_with(&format!("{path}/"))
                        || !matches!(node, TarModelNode::File(_))
                    {
                        continue;
                    }
                    members.push(linked(&path, b'1', &target));
                    model.put(&path, node.clone());
                }
                _ => {
                    let contents = format!("contents {step}");
                    members.push(file(&format!("/{path}"), &contents));
                    model.contents.push(contents);
                    model.put(&path, TarModelNode::File(model.contents.len() - 1));
                }
            }
        }
        let site = BuildSite::new();
        site.builds(&members);
        assert_eq!(site.shown(), model.shown(), "seed {seed}");
    }
}
